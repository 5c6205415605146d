"""A histogram as Prometheus has them: observations counted by upper bounds. Pure.

One observation is a search in a short list and two additions, 0.11 µs, so that latencies can be observed always.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Histogram:
    """Counts of observations up to each bound, and above the last one.

    Bounds are shown in one unit and observed in another, finer one: `scale` is how many of the finer make up one
    of the shown, such as 10**9 for seconds that are observed in nanoseconds.
    """

    __slots__ = ("_bounds", "bounds", "counts", "scale", "sum")

    def __init__(self, bounds: Iterable[float], scale: int = 1) -> None:
        """Bounds may come from a configuration: they are sorted, and what is no finite number is left out."""
        #: Upper bounds in the shown unit, ascending, without the infinite one.
        self.bounds = tuple(sorted({float(bound) for bound in bounds if math.isfinite(bound)}))
        self.scale = scale
        self._bounds = [round(bound * scale) for bound in self.bounds] if scale > 1 else list(self.bounds)
        #: Observations by bucket: not cumulative; the last are those above all bounds.
        self.counts = [0] * (len(self.bounds) + 1)
        #: Sum of the observations, in the finer unit.
        self.sum: float = 0

    def observe(self, value: int) -> None:
        """Count one observation, in the finer unit. One that equals a bound lies below it."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def add(self, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """Add observations that were counted elsewhere; `counts` has one more than `bounds`.

        Where the bounds are others than ours, each counts as if it had been the upper bound of its bucket.
        """
        for index, count in enumerate(counts):
            if count:
                place = bisect_left(self._bounds, bounds[index]) if index < len(bounds) else -1
                self.counts[place] += count
        self.sum += total

    def cumulative(self) -> list[int]:
        """Return the number of observations up to each bound, and of all."""
        return list(accumulate(self.counts))
