"""Loads plan files: serialized engines. A plan belongs to a version of TensorRT and a kind of GPU.

What to do about a plan that cannot be loaded, from TensorRT's own text. Pure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError, Unavailable, Unsupported
from kernel.texts import install_command

if TYPE_CHECKING:
    from backends.base import ModelArguments
    from backends.tensorrt.library import TensorRt


_DEFAULT_FILENAME = "model.plan"


class Plan:
    """A loaded engine, with the runtime that it needs."""

    def __init__(self, runtime: Any, engine: Any) -> None:
        self._runtime = runtime
        self.engine = engine

    def close(self) -> None:
        """Free the engine, then its runtime: the other order ends the process."""
        self.engine = None
        self._runtime = None


def load_plan(
    tensorrt: TensorRt, path: Path, *, model: str, host_code_allowed: bool, capability: tuple[int, int]
) -> Plan:
    """Load a plan file for the current device, which has this compute capability.

    Raises `Unavailable` if the file cannot be read, and `InternalError` with TensorRT's reason, and what to do about
    it, if it cannot be loaded.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = "" if isinstance(error, FileNotFoundError) else f": {error.strerror}"
        raise Unavailable(f"unable to find '{path}' for model instance '{model}'{reason}") from None
    tensorrt.log.take_errors()
    runtime = tensorrt.module.Runtime(tensorrt.logger)
    if runtime is None or tensorrt.log.has_errors:  # without a driver an object comes back that must not be used
        raise InternalError(f"unable to create TensorRT runtime: {tensorrt.log.take_errors()}")
    if host_code_allowed:
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        reason = tensorrt.log.take_errors() or "TensorRT gives no reason"
        hint = plan_hint(reason, tensorrt.version, capability, lean=tensorrt.is_lean)
        raise InternalError(f"unable to create TensorRT engine: {reason}{hint}")
    return Plan(runtime, engine)


def plan_file(arguments: ModelArguments, capability: tuple[int, int]) -> Path:
    """Return the plan for a device of this compute capability: that of `cc_model_filenames`, else the model file.

    Raises `Unsupported` for a file outside the model's folder: a plan can contain code that is executed.
    """
    named = arguments.config.get("cc_model_filenames", {}).get(f"{capability[0]}.{capability[1]}")
    path = arguments.version_dir / named if named else arguments.model_file(_DEFAULT_FILENAME)
    # Only the name is checked: the owner of the repository may link to files outside.
    normal = Path(os.path.normpath(path))
    if not normal.is_relative_to(os.path.normpath(arguments.model_dir)):
        raise Unsupported(f"file path '{path}' in model '{arguments.model_name}' is outside model directory")
    return normal


#: Parts of TensorRT's texts, in lower case, with what they mean. The first one that is found counts.
_CAUSES = (
    (("magic tag",), "notaplan"),
    (("host code",), "hostcode"),
    (("version tag", "expecting library version", "kserialization_version", "lean runtime", "incompatible version"),
     "version"),
    (("compute capability", "expecting compute", "incompatible device", "different sm"), "device"),
    (("getplugincreator", "plugin not found", "creator"), "plugin"),
    (("out of memory", "outofmemory", "cudamalloc", "cuda error 2"), "memory"),
)  # fmt: skip

_BUILD = "build it with `naiad build-engine` on this machine"


def plan_hint(reason: str, version: str, capability: tuple[int, int], *, lean: bool) -> str:
    """Return what to do, as the end of an error's text; empty if `reason` is not known.

    `version` is that of TensorRT, `capability` that of the device; `lean` says that only the runtime for
    version-compatible plans is installed.
    """
    text = reason.lower()
    cause = next((name for parts, name in _CAUSES if any(part in text for part in parts)), "")
    device = f"{capability[0]}.{capability[1]}"
    if cause == "version" and lean:
        return (
            f". This server has only the lean runtime of TensorRT {version}, which loads plans that were built with "
            "`naiad build-engine --version-compatible`: build the plan so, or " + install_command("tensorrt")
        )
    hints = {
        "notaplan": f". The file is no plan of TensorRT: {_BUILD}",
        "version": (
            f". The plan is of another version of TensorRT than this server's, {version}: {_BUILD}, or with "
            "--version-compatible, and start the server with --backend-config=tensorrt,version-compatible=true"
        ),
        "hostcode": (
            ". The plan contains code for the host, as all version-compatible plans: if you trust it, start the server "
            "with --backend-config=tensorrt,version-compatible=true"
        ),
        "device": (
            f". The plan is for another kind of GPU than this one, of compute capability {device}: {_BUILD}, or with "
            "--hardware-compatibility=ampere+, or name a plan for each capability in cc_model_filenames"
        ),
        "plugin": (
            ". A plugin that the plan needs is missing: name its library, --backend-config=tensorrt,plugins=FILE.so"
        ),
        "memory": ". The device has too little free memory",
    }
    return hints.get(cause, "")
