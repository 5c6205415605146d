"""Quantiles of what was observed in the last minute, without keeping the observations. Pure.

Values are counted by their first 8 binary digits: a quantile is exact in rank, and within 0.4 % in value. The window
is Triton's: five buckets of 12 seconds, of which the oldest is dropped when a new one begins.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_AGES = 5
_AGE_NS = 12_000_000_000

#: Values below this are counted as they are.
_EXACT = 256


class SlidingQuantiles:
    """Count and sum of all observations, quantiles of those of the last 48 to 60 seconds."""

    __slots__ = ("_ages", "_next_age_ns", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        #: How often a value class was seen, newest bucket of time last.
        self._ages: deque[dict[int, int]] = deque(({} for _ in range(_AGES)), maxlen=_AGES)
        self._next_age_ns = 0

    def observe(self, value: int, now_ns: int) -> None:
        """Count one observation, which is not negative."""
        if now_ns >= self._next_age_ns:
            self._move_on(now_ns)
        self.count += 1
        self.sum += value
        if value >= _EXACT:
            shift = value.bit_length() - 8
            value = (shift << 7) + (value >> shift)
        newest = self._ages[-1]
        newest[value] = newest.get(value, 0) + 1

    def values(self, quantiles: Iterable[float], now_ns: int) -> list[float]:
        """Return the value of each quantile (0.0 to 1.0); not-a-number where nothing was observed lately."""
        if now_ns >= self._next_age_ns:
            self._move_on(now_ns)
        seen: dict[int, int] = {}
        for age in self._ages:
            for value, times in age.items():
                seen[value] = seen.get(value, 0) + times
        ordered = sorted(seen.items())
        total = sum(seen.values())
        return [_value_at(ordered, math.ceil(quantile * total)) for quantile in quantiles]

    def _move_on(self, now_ns: int) -> None:
        """Begin as many new buckets of time as have passed."""
        passed = (now_ns - self._next_age_ns) // _AGE_NS + 1
        for _ in range(min(passed, _AGES)):
            self._ages.append({})
        self._next_age_ns += passed * _AGE_NS


def _value_at(ordered: list[tuple[int, int]], rank: int) -> float:
    """Return the middle of the value class that the observation of `rank`, counted from 1, belongs to."""
    for value, times in ordered:
        rank -= times
        if rank <= 0:
            shift = (value >> 7) - 1
            return value if shift <= 0 else ((value & 127 | 128) << shift) + (1 << shift >> 1)
    return math.nan
