"""Histograms and quantiles of durations. Pure.

A `Histogram` is one in Prometheus' sense: it counts observations by upper bounds. An observation is a search in a short
list and two additions: 0.11 µs, cheap enough to observe every latency. `Exemplars` are examples of what it has counted:
for each bucket one traced request, by which its trace is found. Only requests that are traced are noted, and only
OpenMetrics shows them.

`SlidingQuantiles` are quantiles of the observations of the last minute, which are not stored: values are counted by
their first 8 binary digits. The rank of a quantile is exact, its value is within 0.4 %. The window is Triton's: five
periods of 12 seconds, of which the oldest is dropped when a new one begins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
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
    #: The id of the trace: OpenTelemetry's, or the number in Triton's JSON.
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


_PERIODS = 5

_PERIOD_NS = 12_000_000_000

#: Smaller values are counted exactly.
_EXACT = 256


class SlidingQuantiles:
    """The count and sum of all observations, and the quantiles of the last 48 to 60 seconds."""

    __slots__ = ("_next_period_ns", "_periods", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        #: Value class → number of observations, for each period, the newest last.
        self._periods: deque[dict[int, int]] = deque(({} for _ in range(_PERIODS)), maxlen=_PERIODS)
        self._next_period_ns = 0

    def observe(self, value: int, now_ns: int) -> None:
        """Count one observation; `value` must not be negative."""
        if now_ns >= self._next_period_ns:
            self._begin_periods(now_ns)
        self.count += 1
        self.sum += value
        if value >= _EXACT:
            shift = value.bit_length() - 8
            value = (shift << 7) + (value >> shift)
        newest = self._periods[-1]
        newest[value] = newest.get(value, 0) + 1

    def values(self, quantiles: Iterable[float], now_ns: int) -> list[float]:
        """Return the value of each quantile (0.0 to 1.0); NaN if the window has no observation."""
        if now_ns >= self._next_period_ns:
            self._begin_periods(now_ns)
        counts: dict[int, int] = {}
        for period in self._periods:
            for value, count in period.items():
                counts[value] = counts.get(value, 0) + count
        ordered = sorted(counts.items())
        total = sum(counts.values())
        return [_value_at(ordered, math.ceil(quantile * total)) for quantile in quantiles]

    def _begin_periods(self, now_ns: int) -> None:
        """Begin the periods that have started since the last call."""
        passed = (now_ns - self._next_period_ns) // _PERIOD_NS + 1
        for _ in range(min(passed, _PERIODS)):
            self._periods.append({})
        self._next_period_ns += passed * _PERIOD_NS


def _value_at(ordered: list[tuple[int, int]], rank: int) -> float:
    """Return the middle of the value class of the observation with `rank`, counted from 1; NaN if there is none."""
    for value, count in ordered:
        rank -= count
        if rank <= 0:
            shift = (value >> 7) - 1
            return value if shift <= 0 else ((value & 127 | 128) << shift) + (1 << shift >> 1)
    return math.nan
