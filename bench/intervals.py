"""What paired rounds say about two servers: the median of their ratios, how sure it is, and a verdict in words. Pure.

Each round measures both servers shortly after one another, so a drift of the machine is in both halves of a ratio.
The interval of the median comes from the order of the ratios alone (the sign test): it needs no assumption about how
they are distributed, and one round that was disturbed does not move it.
"""

from __future__ import annotations

import enum
import math
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

#: How sure a statement must be to be called "with confidence".
CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A median, and limits between which the true median lies with the probability `confidence`."""

    median: float
    low: float
    high: float
    confidence: float

    @property
    def inverse(self) -> Interval:
        """The interval of the reciprocals of the values."""
        return Interval(1 / self.median, 1 / self.high, 1 / self.low, self.confidence)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median of `values` with its narrowest exact interval of at least `confidence`.

    Limits are the k-th smallest and the k-th largest value: the true median lies outside when at most k - 1 of n values
    lie on one side of it, each with probability 1/2. Few values cannot reach `confidence`; their interval goes from the
    smallest to the largest, and says what it reaches. Six values are needed for 0.95. There must be a value.
    """
    ordered = sorted(values)
    count = len(ordered)
    k = 1
    while _coverage(count, k + 1) >= confidence:
        k += 1
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[count - k], _coverage(count, k))


def _coverage(count: int, k: int) -> float:
    """Return how probably the true median lies between the k-th smallest and the k-th largest of `count` values."""
    outside = sum(math.comb(count, each) for each in range(k)) / 2.0 ** (count - 1)
    return max(0.0, 1 - outside)


def geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return for each round the geometric mean of all rows; `rows` hold one positive value per round each."""
    return [statistics.geometric_mean(each) for each in zip(*rows, strict=True)]


class Quantity(enum.Enum):
    """What is compared: its title, and its words for worse and better."""

    RATE = ("rate", "lower", "higher")
    P99 = ("p99", "longer", "shorter")
    CPU = ("kernel CPU", "more", "less")

    def __init__(self, title: str, worse: str, better: str) -> None:
        self.title = title
        self.worse = worse
        self.better = better


class RatioVerdict(msgspec.Struct, frozen=True):
    """A few words about a ratio, and whether it is beyond the limit with confidence."""

    text: str
    beyond_limit: bool = False


def verdict(quantity: Quantity, ratio: Interval, limit: float) -> RatioVerdict:
    """Judge the ratio now/before of a quantity.

    `limit` is the smallest ratio of rates that is accepted, for example 0.93. Where less is better, the largest ratio
    that is accepted is its reciprocal. "Worse with confidence" is said only where the whole interval lies on that side
    of 1, and "beyond the limit with confidence" only where the whole interval does.
    """
    is_rate = quantity is Quantity.RATE
    good = ratio if is_rate else ratio.inverse
    if ratio.confidence < CONFIDENCE:
        return RatioVerdict("too few rounds for a verdict")
    beyond = f"below {limit:.2f}" if is_rate else f"above {1 / limit:.2f}"
    if good.high < limit:
        return RatioVerdict(f"{quantity.worse} with confidence, and {beyond} with confidence", True)
    if good.low > 1:
        return RatioVerdict(f"{quantity.better} with confidence")
    found = f"{quantity.worse} with confidence" if good.high < 1 else "no difference with confidence"
    return RatioVerdict(f"{found}, {'not' if good.low >= limit else 'perhaps'} {beyond}")
