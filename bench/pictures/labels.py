"""Names beside the ends of lines, moved apart where they would lie on one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


class End(NamedTuple):
    """The last point of a line, in data, with what is written beside it."""

    x: float
    y: float
    text: str
    colour: str


#: Between the middles of two labels, in points.
LINE_HEIGHT_PT = 11.5


def apart(wanted: Sequence[float], distance: float) -> list[float]:
    """Return positions as near to the wanted ones as the distance between neighbours allows, in the same order."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[list[float]] = []  # of offsets-free positions that stand together: their middle is their mean
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
    """Write each text to the right of its end. The limits of the axes must be final."""
    if not ends:
        return
    points_per_pixel = 72 / axes.figure.dpi
    heights = [float(axes.transData.transform((end.x, end.y))[1]) * points_per_pixel for end in ends]
    for end, height, place in zip(ends, heights, apart(heights, LINE_HEIGHT_PT), strict=True):
        axes.annotate(
            end.text, (end.x, end.y), xytext=(7, place - height), textcoords="offset points", color=end.colour,
            fontsize=9.5, fontweight="bold", va="center", annotation_clip=False,
        )  # fmt: skip
