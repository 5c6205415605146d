"""Which model the running code works for, so that its log lines can say it without being told.

Tasks and callbacks inherit it from where they were made: what a worker prints, and what becomes of it later,
belongs to the model that it was started for.
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
    """Have log lines of the block, and of what it starts, belong to a model's version."""
    token = _model.set((name, str(version)))
    try:
        yield
    finally:
        _model.reset(token)


def current_model() -> tuple[str, str] | None:
    """Return name and version of the model that the running code works for, if any."""
    return _model.get()
