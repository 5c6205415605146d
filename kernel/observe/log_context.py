"""The model that the running code works for. Log lines add it without an argument.

Tasks and callbacks inherit the model from the code that creates them. So the output of a worker, and later log
lines about the worker, have the model for which the worker was started.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_model: contextvars.ContextVar[tuple[str, str] | None] = contextvars.ContextVar("model", default=None)


@contextlib.contextmanager
def about_model(name: str, version: int) -> Iterator[None]:
    """Log lines in this block, and in tasks that it starts, belong to a version of a model."""
    token = _model.set((name, str(version)))
    try:
        yield
    finally:
        _model.reset(token)


def current_model() -> tuple[str, str] | None:
    """Return name and version of the model that the running code works for, or None."""
    return _model.get()
