"""The density: time until ready, memory and requests per second by the number of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.ticker import FixedLocator, FuncFormatter

from bench.contenders import OURS
from bench.density import KINDS
from bench.pictures.style import BLUE, GREEN, PURPLE, RC, End, footnote, headline, label_ends, paper, plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.density import Density, DensityPoint

COLOURS = {"python": BLUE, "onnx": GREEN, "torch": PURPLE}
_TITLES = {kind.name: kind.title for kind in KINDS}
MIB = 1 << 20

#: Title and value of each panel. Times and memory are drawn on logarithmic scales.
PANELS: list[tuple[str, Callable[[DensityPoint], float], str]] = [
    ("Seconds until the server is ready", lambda point: point.ready_s, "log"),
    ("Memory of all processes, MiB", lambda point: point.footprint.together.proportional / MIB, "log"),
    ("Private memory of a worker, MiB", lambda point: point.footprint.worker_private / MIB, "linear"),
    ("HTTP requests per second, models in turn", lambda point: point.rates.get("http", 0.0), "linear"),
]


def draw_density(density: Density) -> Figure:
    """Return the picture of a measurement, with a panel for each figure."""
    with mpl.rc_context(RC):
        figure = paper(6.4)
        grid = figure.subplots(
            2, 2, gridspec_kw={"left": 0.06, "right": 0.87, "bottom": 0.16, "top": 0.88, "wspace": 0.55, "hspace": 0.42}
        )
        for axes, (title, value, scale) in zip(grid.flat, PANELS, strict=True):
            _panel(axes, density.points, value, scale)
            plain(axes, title)
            label_ends(axes, _ends(density.points, value))
        for axes in grid[1]:
            axes.set_xlabel("models")
        headline(figure, "What many models cost", with_triton=bool(density.triton))
        footnote(figure, *_settings(density))
    return figure


def _panel(axes: Axes, points: list[DensityPoint], value: Callable[[DensityPoint], float], scale: str) -> None:
    for kind, colour in COLOURS.items():
        for server in sorted({point.server for point in points}, reverse=True):  # ours on top of Triton's
            line = _line(points, kind, server)
            counts, values = [point.models for point in line], [value(point) for point in line]
            if not any(values):
                continue
            if server == OURS:
                axes.plot(counts, values, color=colour, linewidth=2.2, marker="o", markersize=3.8, zorder=4)
            else:
                axes.plot(counts, values, color=colour, linewidth=1.4, dashes=(4, 2), alpha=0.75, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale(scale)
    if scale == "linear":
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(FixedLocator(sorted({point.models for point in points})))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:,g}"))


def _line(points: list[DensityPoint], kind: str, server: str) -> list[DensityPoint]:
    return sorted((p for p in points if (p.kind, p.server) == (kind, server)), key=lambda point: point.models)


def _ends(points: list[DensityPoint], value: Callable[[DensityPoint], float]) -> list[End]:
    lines = [(kind, colour, _line(points, kind, OURS)) for kind, colour in COLOURS.items()]
    return [
        End(line[-1].models, value(line[-1]), _TITLES.get(kind, kind), colour)
        for kind, colour, line in lines
        if line and value(line[-1])
    ]


def _settings(density: Density) -> list[str]:
    against = f" Dashed: Triton {density.triton} with its Python backend, same files." if density.triton else ""
    restarts = density.restarts
    again = (
        f" A killed Python worker serves again after {restarts.median_ms:.0f} ms (median of {len(restarts.total_ms)})."
        if restarts is not None
        else ""
    )
    return [
        f"Copies of one model, an instance each.{against} Memory is proportional: shared pages count in part.",
        f"{density.connections} connections ask the models in turn, {density.seconds:g} s ({density.client}).{again}",
        f"{density.machine.line}.",
    ]
