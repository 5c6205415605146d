"""What all pictures have in common: paper, fonts, colours that colour-blind readers can distinguish, and files.

Triton's lines are dashed and lighter in every picture, ours are solid.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

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
