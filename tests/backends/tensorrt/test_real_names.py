"""The fake TensorRT has the names and parameters of the real one, from 10 to 11. No GPU is needed.

Skipped where no TensorRT is installed. `make gpu-names` installs its runtime and TensorRT for RTX, which has a builder.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from typing import Any

import pytest

from backends.tensorrt.library import RUNTIMES
from backends.tensorrt.signature import DATATYPES
from bench.checkout import ROOT
from tests import fake_tensorrt


def _installed() -> list[Any]:
    found = []
    for name in RUNTIMES:
        try:
            found.append(importlib.import_module(name))
        except ImportError:
            continue
    if not found:
        pytest.skip("TensorRT is not installed", allow_module_level=True)
    return found


@pytest.fixture(params=_installed(), ids=lambda module: module.__name__)
def real_module(request: pytest.FixtureRequest) -> Any:
    return request.param


#: Methods of ours that are called by the same names.
OURS = {
    ("context", "output_shapes"),
    ("context", "set_address"),
    ("engine", "capture_graphs"),
    ("engine", "graph_count"),
}

#: The fake's own: what tests read, and what only the builder has, which the runtime alone lacks.
OWN = {"tensor"}
CLASSES = [
    found for name, found in sorted(vars(fake_tensorrt).items()) if inspect.isclass(found) and not name.startswith("_")
]

#: What the runtime alone has; the others are the builder's.
OF_THE_RUNTIME = {
    "DataType", "ExecutionContextAllocationStrategy", "ICudaEngine", "IExecutionContext", "ILogger", "IOutputAllocator",
    "Runtime", "TensorIOMode", "TensorLocation",
}  # fmt: skip


def counterpart(module: Any, fake: type) -> Any:
    """Return the real class; skips if only the builder has it, and it is not there."""
    if not hasattr(module, fake.__name__) and fake.__name__ not in OF_THE_RUNTIME:
        pytest.skip("the runtime alone has no builder")
    return getattr(module, fake.__name__)


def test_the_fake_has_the_classes_of_the_runtime() -> None:
    assert {found.__name__ for found in CLASSES} >= OF_THE_RUNTIME


@pytest.mark.parametrize("fake", [found for found in CLASSES if issubclass(found, enum.Enum)])
def test_an_enumeration_has_the_real_names_and_values(real_module: Any, fake: type[enum.Enum]) -> None:
    real = counterpart(real_module, fake)
    for member in fake:
        if fake.__name__ in ("BuilderFlag", "NetworkDefinitionCreationFlag"):
            # We use the names that are there: versions have other numbers, and not all of them.
            assert any(hasattr(real, each.name) for each in fake)
        else:
            assert int(getattr(real, member.name)) == member.value, member


@pytest.mark.parametrize("fake", [found for found in CLASSES if not issubclass(found, enum.Enum)])
def test_a_class_has_the_real_methods_with_the_real_parameters(real_module: Any, fake: type) -> None:
    real = counterpart(real_module, fake)
    for name, member in vars(fake).items():
        if name.startswith("_") or name in OWN or inspect.isclass(member):
            continue
        assert hasattr(real, name), f"{fake.__name__}.{name}"
        if not inspect.isfunction(member):
            continue
        text = getattr(real, name).__doc__ or ""
        signatures = re.findall(rf"{name}\(self: [^,)]+(.*?)\) ->", text)
        wanted = list(inspect.signature(member).parameters)[1:]
        assert signatures, (fake.__name__, name, text)
        if name == "get_tensor_profile_values":  # the real names are swapped: the types count
            assert signatures == [", name: typing.SupportsInt, profile_index: str"]
            continue
        found = [re.findall(r"(\w+): ", each) for each in signatures]
        assert any(each[: len(wanted)] == wanted or _positional(each, wanted) for each in found), (name, found, wanted)


def _positional(found: list[str], wanted: list[str]) -> bool:
    """Whether the real parameters have no names, and there are as many."""
    return len(found) >= len(wanted) and all(re.fullmatch(r"arg\d+", name) for name in found)


def test_the_datatypes_of_engines_are_known(real_module: Any) -> None:
    assert {name for name in DATATYPES if not hasattr(real_module.DataType, name)} == set()


def test_what_is_called_of_an_engine_a_context_and_a_runtime_is_there(real_module: Any) -> None:
    owners = {"engine": "ICudaEngine", "context": "IExecutionContext", "runtime": "Runtime"}
    text = "\n".join(path.read_text() for path in (ROOT / "backends" / "tensorrt").rglob("*.py"))
    found = set(re.findall(r"\b(engine|context|runtime)\.([a-z]+_[a-z_0-9]+)\b", text))
    for owner, name in found - OURS:
        assert hasattr(getattr(real_module, owners[owner]), name), f"{owner}.{name}"
    assert ("context", "execute_async_v3") in found
