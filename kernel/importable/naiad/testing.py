"""For the tests of authors: Python models without a server, and schedulers with a clock that the test moves.

The names of this module stay, as the names of `naiad` do.
"""

from __future__ import annotations

from naiad.packages import share_names

TYPE_CHECKING = False  # as type checkers know it: the module `typing` is not needed here
if TYPE_CHECKING:
    from typing import Any

    from backends.python.testing import CallInputs as CallInputs
    from backends.python.testing import ModelInProcess as ModelInProcess
    from backends.python.testing import ModelResponse as ModelResponse
    from backends.python.testing import ModelStream as ModelStream
    from backends.python.testing import load_model as load_model
    from kernel.testing import FakeClock as FakeClock
    from kernel.testing import FakeInstance as FakeInstance
    from kernel.testing import Lab as Lab
    from kernel.testing import RecordingSink as RecordingSink
    from kernel.testing import model_spec as model_spec
    from schedulers.testing import KernelLab as KernelLab

#: Module → its names that are public.
_PLACES = {
    "backends.python.testing": "CallInputs ModelInProcess ModelResponse ModelStream load_model",
    "kernel.testing": "FakeClock FakeInstance Lab RecordingSink model_spec",
    "schedulers.testing": "KernelLab",
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}

share_names()


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'naiad.testing' has no attribute '{name}'")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
