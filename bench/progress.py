"""The progress bar of a long run: what is measured now, how much is done, and how long the rest takes."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress() -> Progress:
    """Return a display for one bar. It is drawn once a second, because drawing takes CPU time from the measurement."""
    return Progress(
        TextColumn("{task.description:38}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        refresh_per_second=1,
    )
