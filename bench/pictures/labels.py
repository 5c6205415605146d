"""Names next to the ends of lines. They are moved apart where they would overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


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
