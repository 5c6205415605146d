"""A bar for commands that take a while: on standard error, and only if that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator


class WorkProgress(Protocol):
    """Shows how far the work of a command is."""

    def works_on(self, text: str) -> None:
        """Show what is worked on now."""

    def done(self) -> None:
        """One more part of the work is done."""


class _NoProgress:
    def works_on(self, text: str) -> None:
        """Show nothing."""

    def done(self) -> None:
        """Show nothing."""


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[WorkProgress]:
    """Show a bar of `total` parts during the block; the bar is gone after it."""
    if not sys.stderr.isatty():
        yield _NoProgress()
        return
    from rich.console import Console  # takes memory, which only terminals need
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=total)

        class Bar:
            """Draws on the terminal."""

            def works_on(self, text: str) -> None:
                shown.update(task, description=escape(text))

            def done(self) -> None:
                shown.advance(task)

        yield Bar()
