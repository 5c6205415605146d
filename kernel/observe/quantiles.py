"""Quantiles of the observations of the last minute, without storing the observations. Pure.

Values are counted by their first 8 binary digits: the rank of a quantile is exact, its value is within 0.4 %. The
window is Triton's: five periods of 12 seconds, of which the oldest is dropped when a new one begins.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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
