"""Pictures of latency against throughput: of the servers of `naiad bench --png`, of the configurations of `naiad tune`.

They need matplotlib, which no server needs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kernel.texts import install_command
from kernel.tools.client import ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kernel.tools.bench.results import BenchRun
    from kernel.tools.bench.tune_candidates import LatencyGoal, TuneCandidate, TuneRow

_COLOURS = ("#1f6feb", "#d1582a")

_MARKERS = ("o", "s", "^", "D", "v")


def check_plotting() -> None:
    """Raise `ClientError` if pictures cannot be drawn. Called before a load, which may take minutes."""
    try:
        import matplotlib  # noqa: F401 - imported late: no other command needs it
    except ImportError:
        raise ClientError(
            f"--png needs matplotlib, which is not installed: {install_command('plot')}, or take --csv"
        ) from None


@contextlib.contextmanager
def _axes(title: str, latency: str, path: Path) -> Iterator[Any]:
    """Yield axes to draw on, and write the picture behind the block. Raises `ClientError`."""
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    yield axes
    axes.set_xlabel("requests per second")
    axes.set_ylabel(f"{latency} in ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.25)
    axes.set_title(title)
    if axes.lines:
        axes.legend(fontsize=8)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ClientError(f"--png: cannot write '{path}': {error}") from None


def draw(runs: Sequence[BenchRun], path: Path) -> None:
    """Write a picture of up to two runs. Raises `ClientError`."""
    of_rate = any(row.target_rate for run in runs for row in run.points)
    title = f"{runs[0].model}: the numbers are {'the rates asked for' if of_rate else 'requests in flight'}"
    with _axes(title, "latency", path) as axes:
        for number, run in enumerate(runs):
            points = [row for row in run.points if row.completed]
            known = list(points[0].latency.percentiles) if points else []
            percents = [each for each in known if each in ("50", "99")] or known[:2]
            for style, percent in enumerate(percents):
                axes.plot(
                    [row.rate for row in points],
                    [row.latency.percentiles[percent] / 1e3 for row in points],
                    color=_COLOURS[number % 2],
                    linestyle=("-", "--")[style],
                    marker=_MARKERS[style],
                    markersize=4,
                    label=f"{'AB'[number % 2] + ': ' if len(runs) > 1 else ''}{run.label} ({run.server}), p{percent}",
                )
            for row in points if percents else ():
                text = f"{row.target_rate:g}/s" if row.target_rate else str(row.connections)
                axes.annotate(
                    text, (row.rate, row.latency.percentiles[percents[0]] / 1e3), textcoords="offset points",
                    xytext=(4, -10), fontsize=7, color=_COLOURS[number % 2],
                )  # fmt: skip


def draw_candidates(
    rows: Sequence[TuneRow], goal: LatencyGoal, best: TuneCandidate | None, title: str, path: Path
) -> None:
    """Write a picture. Raises `ClientError`."""
    with _axes(title, f"p{goal.percent}", path) as axes:
        for row in rows:
            loads = [load for load in row.loads if load.completed]
            chosen = row.candidate == best
            axes.plot(
                [load.rate for load in loads],
                [goal.of(load) / 1e3 for load in loads],
                marker="o", markersize=4, linewidth=2.5 if chosen else 1, alpha=1 if chosen else 0.6,
                label=f"{row.candidate.text()}{' (best)' if chosen else ''}",
            )  # fmt: skip
        if goal.ms:
            axes.axhline(goal.ms, color="#888888", linestyle=":", label=goal.text())
