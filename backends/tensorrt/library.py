"""Finds TensorRT: the whole library, or only its runtime. No other module imports it.

The Python interface of the runtime is the same from 10.13 to 11. `NAIAD_TENSORRT` names another module in its place,
for tests without a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError, Unavailable
from kernel.texts import install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODULE_VARIABLE = "NAIAD_TENSORRT"

#: The whole library; the runtime for version-compatible plans; TensorRT for RTX. Each once by the name of its own
#: package, and once by that of the package with the bindings, which can be installed alone.
RUNTIMES = (
    "tensorrt",
    "tensorrt_bindings",
    "tensorrt_lean",
    "tensorrt_lean_bindings",
    "tensorrt_rtx",
    "tensorrt_rtx_bindings",
)

#: The modules that can build engines.
BUILDERS = tuple(name for name in RUNTIMES if "lean" not in name)

_MISSING = f"{install_command('tensorrt')}, or tensorrt-lean-cu13-bindings for version-compatible plans only"


class TensorRtLog:
    """What TensorRT has logged in this process. Errors are kept: the calls themselves return only None or False."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        """`log` writes a line to the server's log: level, text."""
        self._log = log
        self._errors: list[str] = []

    def write(self, level: str, text: str) -> None:
        """Take a message: `level` is INTERNAL_ERROR, ERROR, WARNING, INFO or VERBOSE."""
        if "ERROR" in level:
            self._errors.append(text)
            del self._errors[:-8]
            self._log("ERROR", text)
        elif level != "VERBOSE":
            self._log("VERBOSE" if level == "INFO" else "WARNING", text)

    @property
    def has_errors(self) -> bool:
        return bool(self._errors)

    def take_errors(self) -> str:
        """Return the errors since the last call, and forget them: several are joined. Empty if there were none."""
        text = "; ".join(dict.fromkeys(self._errors))
        self._errors.clear()
        return text


class TensorRt:
    """The library of this process: its module, and an object that takes its messages."""

    def __init__(self, module: Any, log: TensorRtLog) -> None:
        self.module = module
        self.log = log
        #: The version, such as `11.4.0.106`.
        self.version: str = getattr(module, "__version__", "of unknown version")
        #: Whether this is the runtime alone, which reads only version-compatible plans.
        self.is_lean = "lean" in module.__name__
        self.logger = _logger(module, log)

    def load_plugins(self, libraries: Sequence[str]) -> None:
        """Load shared libraries with plugins, and those that come with TensorRT. Raises `InternalError`."""
        for library in libraries:
            try:
                ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise InternalError(f"unable to load the TensorRT plugin library '{library}': {error}") from None
        if hasattr(self.module, "init_libnvinfer_plugins"):  # the lean runtime has none
            self.module.init_libnvinfer_plugins(self.logger, "")


def find_tensorrt(log: Callable[[str, str], None], names: Sequence[str] = RUNTIMES) -> TensorRt:
    """Import the first of the modules that can be imported. Raises `Unavailable`, which says what is missing."""
    chosen = os.environ.get(MODULE_VARIABLE)
    failures: dict[str, str] = {}
    for name in (chosen,) if chosen else names:
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # the bindings are there and their libraries are not, for example
            if getattr(error, "name", None) != name:
                failures[name] = str(error)
            continue
        return TensorRt(module, TensorRtLog(log))
    reasons = "".join(f"; {name}: {text}" for name, text in failures.items())
    raise Unavailable(f"TensorRT is not installed: {_MISSING}{reasons}")


def _logger(module: Any, log: TensorRtLog) -> Any:
    """Return a TensorRT logger that writes to `log`. Its class has to be one of TensorRT's."""

    class ForwardingLogger(module.ILogger):  # type: ignore[misc]  # a class that is known only now
        """Called from any thread, also within a call."""

        def __init__(self) -> None:
            module.ILogger.__init__(self)

        def log(self, severity: Any, msg: str) -> None:
            log.write(getattr(severity, "name", str(severity)), msg)

    return ForwardingLogger()
