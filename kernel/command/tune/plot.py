"""The picture of `naiad tune --png`: for each configuration, latency against throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.command.bench.report.plot import check_plotting
from kernel.command.infer.connection import ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.command.tune.report import LatencyGoal, TuneRow
    from kernel.command.tune.search import TuneCandidate


def draw_candidates(
    rows: Sequence[TuneRow], goal: LatencyGoal, best: TuneCandidate | None, title: str, path: Path
) -> None:
    """Write a picture. Raises `ClientError`."""
    check_plotting()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
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
    axes.set_xlabel("requests per second")
    axes.set_ylabel(f"p{goal.percent} in ms")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.25)
    axes.set_title(title)
    axes.legend(fontsize=7)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ClientError(f"--png: cannot write '{path}': {error}") from None
