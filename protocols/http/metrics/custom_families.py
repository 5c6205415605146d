"""The metrics that models define themselves, as lines of the page. Pure.

Help texts and label values come from models, and may come from their clients: they are escaped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from protocols.http.metrics.text import help_text, label_text, number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.observe.custom_metrics import CustomFamily
    from kernel.observe.histogram import Histogram


def render_custom(families: Iterable[CustomFamily]) -> list[str]:
    """Return the lines of `families`."""
    lines: list[str] = []
    for family in families:
        if family.help:
            lines.append(f"# HELP {family.name} {help_text(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind.value}")
        for labels, series in family.series.items():
            text = label_text(dict(labels))
            if series.histogram is None:
                lines.append(f"{family.name}{_braced(text)} {number(series.value)}")
            else:
                _render_histogram(lines, family.name, text, series.histogram)
    return lines


def _render_histogram(lines: list[str], name: str, labels: str, histogram: Histogram) -> None:
    counts = histogram.cumulative()
    braced = _braced(labels)
    lines += (f"{name}_count{braced} {counts[-1]}", f"{name}_sum{braced} {number(histogram.sum)}")
    before = f"{labels}," if labels else ""
    lines += [
        f'{name}_bucket{{{before}le="{number(bound)}"}} {count}'
        for bound, count in zip((*histogram.bounds, math.inf), counts, strict=True)
    ]


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""
