"""What all pictures have in common: paper, fonts, colours that colour-blind readers can distinguish, files, labels.

Triton's lines are dashed and lighter in every picture, ours are solid. Names next to the ends of lines are moved apart
where they would overlap.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.store import write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

INK, SOFT, FAINT, PAPER = "#1f2328", "#59636e", "#d9dee3", "#ffffff"

#: The palette of Okabe and Ito. Colours that are used for text on white are darker.
VERMILLION, BLUE, GREEN, PURPLE = "#d55e00", "#0072b2", "#00805f", "#b0508a"

WIDTH_IN, DPI = 10.4, 160  # shown at about 830 pixels: 10 points here are 11 pixels there

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "svg.hashsalt": "naiad",  # equal numbers give equal files
    "svg.fonttype": "path",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
}


def paper(height_in: float) -> Figure:
    """Return an empty figure. Draw it inside `mpl.rc_context(RC)`."""
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes, title: str) -> None:
    """Give axes a title on the left, a light grid, and no box."""
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(which="major", color=FAINT, linewidth=0.6)
    axes.tick_params(which="both", length=0, labelsize=8.5)
    axes.minorticks_off()
    axes.set_axisbelow(True)


def headline(figure: Figure, title: str, *, with_triton: bool, extra: list[Line2D] | None = None) -> None:
    """Write the title and the legend of the servers above the panels."""
    keys = [Line2D([], [], color=INK, linewidth=2.2, label="Naiad")]
    if with_triton:
        keys.append(Line2D([], [], color=INK, linewidth=1.4, dashes=(4, 2), alpha=0.75, label="Triton"))
    headline_of(figure, title, keys + (extra or []))


def headline_of(figure: Figure, title: str, keys: Sequence[Artist]) -> None:
    """Write the title and a legend of any kind above the panels."""
    figure.text(0.012, 0.985, title, fontsize=13.5, fontweight="bold", va="top")
    figure.legend(
        handles=keys, loc="upper right", bbox_to_anchor=(0.995, 1.0), ncols=len(keys), frameon=False, handlelength=2.8
    )


def footnote(figure: Figure, *lines: str) -> None:
    """Write lines of settings below the panels."""
    figure.text(0.012, 0.015, "\n".join(lines), fontsize=7.8, color=SOFT, va="bottom", linespacing=1.5)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write the figure as PNG and SVG. Returns the files."""
    written: list[Path] = []
    with mpl.rc_context(RC):
        for ending, metadata in (("png", {"Software": ""}), ("svg", {"Date": None, "Creator": ""})):
            memory = io.BytesIO()
            figure.savefig(memory, format=ending, dpi=DPI, metadata=metadata)
            path = stem.with_suffix(f".{ending}")
            write(path, memory.getvalue())
            written.append(path)
    return written


class End(NamedTuple):
    """The last point of a line, in units of the data, with its label."""

    x: float
    y: float
    text: str
    colour: str


#: The distance between the middles of two labels, in points.
LINE_HEIGHT_PT = 11.5


def apart(wanted: Sequence[float], distance: float) -> list[float]:
    """Return positions near the wanted ones, in the same order, with at least `distance` between neighbours."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[list[float]] = []  # wanted positions of neighbours that touch; their block is centred at their mean
    for index in order:
        groups.append([wanted[index]])
        while len(groups) > 1 and _span(groups[-1], distance)[0] - _span(groups[-2], distance)[1] < distance:
            groups[-2:] = [groups[-2] + groups[-1]]
    placed: list[float] = []
    for group in groups:
        first = _span(group, distance)[0]
        placed += [first + distance * number for number in range(len(group))]
    found = [0.0] * len(wanted)
    for index, position in zip(order, placed, strict=True):
        found[index] = position
    return found


def _span(group: list[float], distance: float) -> tuple[float, float]:
    middle, half = sum(group) / len(group), distance * (len(group) - 1) / 2
    return middle - half, middle + half


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write each label to the right of its point. The limits of the axes must be final."""
    if not ends:
        return
    points_per_pixel = 72 / axes.figure.dpi
    heights = [float(axes.transData.transform((end.x, end.y))[1]) * points_per_pixel for end in ends]
    for end, height, place in zip(ends, heights, apart(heights, LINE_HEIGHT_PT), strict=True):
        axes.annotate(
            end.text, (end.x, end.y), xytext=(7, place - height), textcoords="offset points", color=end.colour,
            fontsize=9.5, fontweight="bold", va="center", annotation_clip=False,
        )  # fmt: skip
