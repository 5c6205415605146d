"""The models of `bench density`: copies of a Python model, of the demo's ONNX model, of a model that imports torch."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

import msgspec

from bench.checkout import ROOT
from bench.load_clients import ADD_SUB, Inputs
from bench.models import PYTHON_MODELS, write_python_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DIGITS = ROOT / "kernel/demo/digits"


class ModelKind(msgspec.Struct, frozen=True):
    """One kind of model."""

    name: str
    title: str
    #: Write a copy into a folder that does not exist yet.
    write: Callable[[Path], None]
    inputs: Inputs
    #: Whether the Triton that is compared with can run it: it has the Python backend only.
    triton: bool
    #: The package that it imports.
    needs: str = ""

    def missing(self) -> str:
        """Return why it cannot be measured here; "" if it can."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.title}: {self.needs} is not installed"
        return ""


def _python(folder: Path) -> None:
    write_python_model(folder, *PYTHON_MODELS["add_sub"])


def _torch(folder: Path) -> None:
    config, source = PYTHON_MODELS["add_sub"]
    write_python_model(folder, config, f"import torch\n\n\n{source}")


def _digits(folder: Path) -> None:
    shutil.copytree(DIGITS, folder)


KINDS = [
    ModelKind("python", "Python add_sub", _python, ADD_SUB, triton=True),
    ModelKind("onnx", "ONNX digits", _digits, Inputs(("image",), (1, 8, 8)), triton=False),
    ModelKind("torch", "Python with torch", _torch, ADD_SUB, triton=True, needs="torch"),
]


def model_name(number: int) -> str:
    """Return the name of a copy."""
    return f"model_{number:03}"


def write_copies(repository: Path, kind: ModelKind, count: int) -> list[str]:
    """Write `count` copies into the repository; returns their names."""
    names = [model_name(number) for number in range(count)]
    for name in names:
        kind.write(repository / name)
    return names
