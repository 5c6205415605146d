"""A histogram in Prometheus' sense: it counts observations by upper bounds. Pure.

An observation is a search in a short list and two additions: 0.11 µs, cheap enough to observe every latency. Exemplars
are examples of what it has counted: for each bucket one traced request, by which its trace is found. Only requests that
are traced are noted, and only OpenMetrics shows them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: How long an example stays before another one of its bucket takes its place, in nanoseconds.
STAY_NS = 1_000_000_000
#: The shortest time between two observations that are checked, in nanoseconds.
LOOK_NS = 1_000_000


class Histogram:
    """Counts of observations up to each bound, and above the last one.

    Bounds may have a larger unit than observations: `scale` is the ratio, such as 10**9 for bounds in seconds and
    observations in nanoseconds.
    """

    __slots__ = ("bounds", "counts", "observed_bounds", "scale", "sum")

    def __init__(self, bounds: Iterable[float], scale: int = 1) -> None:
        """Bounds may come from a model's configuration: they are sorted, and NaN and infinite bounds are ignored."""
        #: Upper bounds in the unit of bounds, ascending, without the infinite bound.
        self.bounds = tuple(sorted({float(bound) for bound in bounds if math.isfinite(bound)}))
        self.scale = scale
        #: The bounds in the unit of observations.
        self.observed_bounds = [round(bound * scale) for bound in self.bounds] if scale > 1 else list(self.bounds)
        #: Observations in each bucket, not cumulative. The last bucket is above all bounds.
        self.counts = [0] * (len(self.bounds) + 1)
        #: Sum in the unit of observations.
        self.sum: float = 0

    def observe(self, value: int) -> None:
        """Count one observation. An observation that equals a bound is in the bucket below it."""
        self.counts[bisect_left(self.observed_bounds, value)] += 1
        self.sum += value

    def add(self, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """Add the counts of another histogram; `counts` has one entry more than `bounds`.

        If the bounds differ, each observation counts as the upper bound of its bucket.
        """
        for index, count in enumerate(counts):
            if count:
                bucket = bisect_left(self.observed_bounds, bounds[index]) if index < len(bounds) else -1
                self.counts[bucket] += count
        self.sum += total

    def cumulative(self) -> list[int]:
        """Return the number of observations up to each bound; the last entry counts all observations."""
        return list(accumulate(self.counts))


class Exemplar(msgspec.Struct, frozen=True, gc=False):
    """One observation."""

    #: In the unit of observations.
    value: int
    #: The id of the trace: that of OpenTelemetry, or the number in Triton's JSON.
    trace_id: str
    #: When it was observed, in monotonic nanoseconds.
    observed_ns: int


class Exemplars:
    """The examples of one histogram."""

    __slots__ = ("_bounds", "_due_ns", "found")

    def __init__(self, histogram: Histogram) -> None:
        self._bounds = histogram.observed_bounds
        count = len(self._bounds) + 1
        #: By bucket. The last bucket is above all bounds.
        self.found: list[Exemplar | None] = [None] * count
        self._due_ns = [0] * count

    def due(self, value: int, now_ns: int) -> bool:
        """Whether `value` is to be noted: its bucket has no example, or an old one."""
        return now_ns >= self._due_ns[bisect_left(self._bounds, value)]

    def note(self, value: int, trace_id: str, now_ns: int) -> None:
        """Keep an observation as the example of its bucket."""
        bucket = bisect_left(self._bounds, value)
        self._due_ns[bucket] = now_ns + STAY_NS
        self.found[bucket] = Exemplar(value, trace_id, now_ns)
