"""Imports what a model has chosen to have imported before its workers are forked.

A zygote does it once for all workers of the model; a worker that could not be forked does it itself.
"""

from __future__ import annotations

import importlib
import os
import runpy
from typing import TYPE_CHECKING

from kernel.errors import failing_as

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class PreloadFailed(Exception):
    """The message says what was imported and why it failed."""


def run_chosen(modules: Sequence[str], file: str) -> None:
    """Import `modules`, and run `file` ("" for none). Raises `PreloadFailed`."""
    for module in modules:
        with failing_as(_failure(f"'{module}' cannot be imported")):
            importlib.import_module(module)
    if file:
        with failing_as(_failure(f"{os.path.basename(file)} failed")):
            runpy.run_path(file)


def _failure(text: str) -> Callable[[Exception], PreloadFailed]:
    return lambda error: PreloadFailed(f"{text}: {type(error).__name__}: {error}")
