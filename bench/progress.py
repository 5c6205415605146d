"""How a long run shows that it lives: what is measured now, how far it is, how long it still takes."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress() -> Progress:
    """Return a progress display for one bar; drawn seldom, because drawing takes CPU time from what is measured."""
    return Progress(
        TextColumn("{task.description:38}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        refresh_per_second=1,
    )
