"""Statistics of paired rounds: the median of the ratios of two servers, its confidence interval, and a verdict. Pure.

Each round measures one server directly after the other, so a drift of the machine affects both sides of a ratio. The
interval of the median uses only the order of the ratios (sign test). It needs no assumption about their distribution,
and a single round that was disturbed has no influence on it.
"""

from __future__ import annotations

import enum
import math
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The confidence that a verdict needs.
CONFIDENCE = 0.95


class Interval(msgspec.Struct, frozen=True):
    """A median, and the limits between which the true median lies with probability `confidence`."""

    median: float
    low: float
    high: float
    confidence: float

    @property
    def inverse(self) -> Interval:
        """The interval of the reciprocals of the values."""
        return Interval(1 / self.median, 1 / self.high, 1 / self.low, self.confidence)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the median of `values`, at least one, with its narrowest exact interval that reaches `confidence`.

    The limits are the k-th smallest and the k-th largest value. The true median lies outside if fewer than k values lie
    on one side of it, where each value lies with probability 1/2. If there are too few values for `confidence` (six for
    0.95), the limits are the smallest and the largest value, with the confidence that they have.
    """
    ordered = sorted(values)
    count = len(ordered)
    k = _rank(count, confidence)
    return Interval(statistics.median(ordered), ordered[k - 1], ordered[count - k], _coverage(count, k))


def _rank(count: int, confidence: float) -> int:
    """Return k: the limits of an interval are the k-th smallest and the k-th largest of `count` values."""
    k = 1
    while _coverage(count, k + 1) >= confidence:
        k += 1
    return k


def is_acquitted(goods: Sequence[float], rounds: int, limit: float) -> bool:
    """Return whether the interval of all `rounds` can no longer lie below `limit`, whatever the rounds to come bring.

    `goods` are the ratios so far, of which lower is worse. The interval's upper limit is the k-th largest value, so
    that k values at or above `limit` settle it (two of nine rounds, one of six). What is measured after that cannot
    change the verdict, so that leaving it out does not, either: a stopped row would have been acquitted in the end,
    and a row that is found guilty has all its rounds. With too few `rounds` for a verdict no row is stopped.
    """
    k = _rank(rounds, CONFIDENCE)
    if _coverage(rounds, k) < CONFIDENCE:
        return False
    return sum(each >= limit for each in goods) >= k


def _coverage(count: int, k: int) -> float:
    """Return the probability that the true median lies between the k-th smallest and the k-th largest value."""
    outside = sum(math.comb(count, each) for each in range(k)) / 2.0 ** (count - 1)
    return max(0.0, 1 - outside)


def geometric_means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean of all rows for each round. Each row has one positive value per round."""
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

    def beyond(self, limit: float) -> str:
        """Say that a ratio is worse than `limit`, the smallest ratio of rates that is accepted."""
        return f"below {limit:.2f}" if self is Quantity.RATE else f"above {1 / limit:.2f}"


#: The verdict on fewer rounds than `CONFIDENCE` needs.
TOO_FEW = "too few rounds for a verdict"


class RatioVerdict(msgspec.Struct, frozen=True):
    """A verdict on a ratio in words, and whether the ratio is beyond the limit with confidence."""

    text: str
    beyond_limit: bool = False

    @property
    def confident(self) -> bool:
        """Whether there were enough rounds for a verdict."""
        return self.text != TOO_FEW


def verdict(quantity: Quantity, ratio: Interval, limit: float) -> RatioVerdict:
    """Judge the ratio now/before of a quantity.

    `limit` is the smallest ratio of rates that is accepted, for example 0.93. Its reciprocal is the largest ratio of
    latencies and of CPU times that is accepted. A quantity is worse with confidence only if the whole interval lies on
    the bad side of 1, and beyond the limit with confidence only if the whole interval lies beyond it.
    """
    is_rate = quantity is Quantity.RATE
    good = ratio if is_rate else ratio.inverse
    if ratio.confidence < CONFIDENCE:
        return RatioVerdict(TOO_FEW)
    beyond = quantity.beyond(limit)
    if good.high < limit:
        return RatioVerdict(f"{quantity.worse} with confidence, and {beyond} with confidence", True)
    if good.low > 1:
        return RatioVerdict(f"{quantity.better} with confidence")
    found = f"{quantity.worse} with confidence" if good.high < 1 else "no difference with confidence"
    return RatioVerdict(f"{found}, {'not' if good.low >= limit else 'perhaps'} {beyond}")
