"""Whether what a server holds stays constant. Pure.

Samples are taken while no request runs and no client is connected. Those before `warm_up_s` do not count: a process
grows by what it loads when it is first needed.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.faults.soak.holdings import Holdings

#: How much memory and descriptors of workers may differ, as a part.
TOLERANCE = 0.05

#: Memory and counts that may move a little, because workers are replaced and allocators round.
NEARLY = ("memory", "children_memory", "children_descriptors")
#: Counts that are the same each time nothing runs.
EXACTLY = ("descriptors", "threads", "children", "leased", "in_flight", "sequences", "regions")


def warm_up_s(seconds: float) -> float:
    """Return how long the first samples of a run do not count: ten minutes of an hour, a minute of five."""
    return min(600.0, seconds / (6 if seconds >= 3600 else 5))


def after_warm_up(samples: Sequence[Holdings], seconds: float) -> list[Holdings]:
    """Return the samples that count."""
    return [each for each in samples if each.at_s >= warm_up_s(seconds)]


def change(samples: Sequence[Holdings], name: str) -> float:
    """Return how much the last third of the samples differs from the first, as a part: medians."""
    values = [getattr(each, name) for each in samples]
    third = max(1, len(values) // 3)
    before, after = statistics.median(values[:third]), statistics.median(values[-third:])
    return (after - before) / before if before else float(after > 0)


def wrong(samples: Sequence[Holdings], seconds: float) -> list[str]:
    """Return what has grown, in words; empty if nothing has. Fewer is right, too."""
    counted = after_warm_up(samples, seconds)
    if len(counted) < 3:
        return ["there are too few samples"]
    found = [f"{name} has grown by {change(counted, name):.1%}" for name in NEARLY if change(counted, name) > TOLERANCE]
    third = max(1, len(counted) // 3)
    for name in EXACTLY:
        most = max(getattr(each, name) for each in counted[:third])
        last = min(getattr(each, name) for each in counted[-third:])
        if last > most:
            found.append(f"{name} was {most} at most, and is {last} at least")
    return found
