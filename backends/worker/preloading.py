"""Imports what a model has chosen to have imported before its workers are forked.

A zygote does it once for all workers of the model; a worker that could not be forked does it itself.
"""

from __future__ import annotations

import importlib
import os
import runpy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class PreloadFailed(Exception):
    """The message says what was imported and why it failed."""


def run_chosen(modules: Sequence[str], file: str) -> None:
    """Import `modules`, and run `file` ("" for none). Raises `PreloadFailed`."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise PreloadFailed(f"'{module}' cannot be imported: {type(error).__name__}: {error}") from error
    if file:
        try:
            runpy.run_path(file)
        except Exception as error:
            raise PreloadFailed(f"{os.path.basename(file)} failed: {type(error).__name__}: {error}") from error
