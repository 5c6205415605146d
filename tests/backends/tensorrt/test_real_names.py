"""The fake TensorRT has the names and parameters of the real one, from 10 to 11. No GPU is needed.

Skipped where no TensorRT is installed; its runtime alone is enough (`tensorrt-lean-cu13-bindings`).
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from typing import Any

import pytest

from backends.tensorrt.plans.library import _RUNTIMES
from backends.tensorrt.signature import DATATYPES
from bench.checkout import ROOT
from tests import fake_tensorrt


def _real() -> Any:
    for name in _RUNTIMES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    pytest.skip("TensorRT is not installed", allow_module_level=True)


REAL = _real()

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
    found
    for name, found in sorted(vars(fake_tensorrt).items())
    if inspect.isclass(found) and hasattr(REAL, name) and not name.startswith("_")
]


def test_the_classes_of_the_runtime_are_there() -> None:
    names = {found.__name__ for found in CLASSES}
    assert names >= {
        "DataType", "ExecutionContextAllocationStrategy", "ICudaEngine", "IExecutionContext", "ILogger",
        "IOutputAllocator", "Runtime", "TensorIOMode", "TensorLocation",
    }  # fmt: skip


@pytest.mark.parametrize("fake", [found for found in CLASSES if issubclass(found, enum.Enum)])
def test_an_enumeration_has_the_real_names_and_values(fake: type[enum.Enum]) -> None:
    real = getattr(REAL, fake.__name__)
    for member in fake:
        if fake.__name__ == "BuilderFlag":  # we use the names that are there; TensorRT 11 has other numbers
            assert "BuilderFlag" in dir(REAL)
        else:
            assert int(getattr(real, member.name)) == member.value, member


@pytest.mark.parametrize("fake", [found for found in CLASSES if not issubclass(found, enum.Enum)])
def test_a_class_has_the_real_methods_with_the_real_parameters(fake: type) -> None:
    real = getattr(REAL, fake.__name__)
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


def test_the_datatypes_of_engines_are_known() -> None:
    assert {name for name in DATATYPES if not hasattr(REAL.DataType, name)} == set()


def test_what_is_called_of_an_engine_a_context_and_a_runtime_is_there() -> None:
    owners = {"engine": "ICudaEngine", "context": "IExecutionContext", "runtime": "Runtime"}
    text = "\n".join(path.read_text() for path in (ROOT / "backends" / "tensorrt").rglob("*.py"))
    found = set(re.findall(r"\b(engine|context|runtime)\.([a-z]+_[a-z_0-9]+)\b", text))
    for owner, name in found - OURS:
        assert hasattr(getattr(REAL, owners[owner]), name), f"{owner}.{name}"
    assert ("context", "execute_async_v3") in found
