"""`LatencyHistogram`: latencies counted in buckets that are less than 1 % wide. Pure.

A run of any length takes the same memory, and the counts of several processes can be added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Values below 2 ** this are counted exactly; above, each power of two has half as many buckets.
_BITS = 8
_HALF = 1 << (_BITS - 1)

#: Buckets for values of up to 2 ** 48 nanoseconds, which are three days.
_MAX_VALUE = (1 << 48) - 1
_BUCKETS = (48 - _BITS + 2) * _HALF


class LatencyHistogram:
    """Counts of values in nanoseconds."""

    __slots__ = ("_counts", "count", "largest", "total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.count = 0
        #: Sum of all values.
        self.total = 0
        self.largest = 0

    def record(self, value: int) -> None:
        """Count a value. Negative ones count as 0."""
        if value < 0:
            value = 0
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value
        if value > _MAX_VALUE:
            value = _MAX_VALUE
        shift = value.bit_length() - _BITS
        self._counts[value if shift <= 0 else shift * _HALF + (value >> shift)] += 1

    @property
    def mean(self) -> float:
        """The mean of the values themselves, not of their buckets; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Return a value that `percent` of the values do not exceed, with an error below 1 %; 0 without values."""
        if not self.count:
            return 0.0
        rank = max(1, min(self.count, -(-self.count * percent // 100)))
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return min(_middle(index), float(self.largest))
        raise AssertionError

    def as_map(self) -> dict[int, int]:
        """Return index of a bucket → its count, without empty buckets."""
        return {index: count for index, count in enumerate(self._counts) if count}

    def add(self, counts: Mapping[int, int], total: int, largest: int) -> None:
        """Add what `as_map`, `total` and `largest` of another histogram are."""
        for index, count in counts.items():
            self._counts[index] += count
            self.count += count
        self.total += total
        self.largest = max(self.largest, largest)


def _middle(index: int) -> float:
    """Return the middle of a bucket."""
    if index < 2 * _HALF:
        return float(index)
    shift = index // _HALF - 1
    low = (index - shift * _HALF) << shift
    return low + ((1 << shift) - 1) / 2
