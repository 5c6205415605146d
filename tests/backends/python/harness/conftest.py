"""Writes Python models that tests load in their own process."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    WriteModel = Callable[..., Path]

CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

IMPORTS = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """Return a function that writes a model from the methods of its class, and returns its folder."""

    def write(methods: str, config: str = CONFIG, name: str = "lab", version: int = 1) -> Path:
        folder = tmp_path / name
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(config)
        body = textwrap.indent(textwrap.dedent(methods), "    ")
        (folder / str(version) / "model.py").write_text(f"{IMPORTS}class TritonPythonModel:\n{body}\n")
        return folder

    return write
