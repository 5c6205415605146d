"""Examples of what a histogram has counted: for each bucket one traced request, by which its trace is found. Pure.

Only requests that are traced are noted. The metrics page shows them to scrapers that ask for OpenMetrics.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.observe.histogram import Histogram

#: How long an example stays before another one of its bucket takes its place, in nanoseconds.
STAY_NS = 1_000_000_000


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
