"""What happened in the last seconds, from counters that only grow: rates, quantiles, batch sizes. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: How far back a window reaches, in nanoseconds.
WINDOW_NS = 10_000_000_000


class Reading(msgspec.Struct):
    """The counters of a model version at one time."""

    at_ns: int
    success: int = 0
    fail: int = 0
    #: Refused by a full queue or by a quota.
    refused: int = 0
    #: Rows and executions.
    rows: int = 0
    executions: int = 0
    #: Sums of the stages of requests, in nanoseconds: queue, input, inference, output.
    stages_ns: tuple[int, int, int, int] = (0, 0, 0, 0)
    #: Requests by duration, as `Histogram.counts` has them.
    durations: tuple[int, ...] = ()
    #: Executions by rows.
    batches: Mapping[int, int] = {}

    def same_counts(self, other: Reading) -> bool:
        """Whether nothing was counted between both."""
        return (self.success, self.fail, self.refused, self.executions) == (
            other.success, other.fail, other.refused, other.executions,
        )  # fmt: skip


class Window:
    """The readings of one model version over the last `WINDOW_NS`. A model that is idle needs one."""

    __slots__ = ("_readings",)

    def __init__(self, first: Reading) -> None:
        self._readings = deque([first])

    @property
    def newest(self) -> Reading:
        return self._readings[-1]

    @property
    def quiet(self) -> bool:
        """Whether nothing was counted within the window."""
        return len(self._readings) == 1 or self.newest.same_counts(self._readings[0])

    @property
    def resting(self) -> bool:
        """Whether `rest` was called last."""
        return len(self._readings) == 1

    def add(self, reading: Reading) -> None:
        """Add a reading, and forget those that are older than the window but the newest of them."""
        readings = self._readings
        if reading.success < self.newest.success or reading.fail < self.newest.fail:
            readings.clear()  # the model was loaded again
        readings.append(reading)
        while len(readings) > 2 and readings[1].at_ns <= reading.at_ns - WINDOW_NS:
            readings.popleft()

    def rest(self, now_ns: int) -> None:
        """Nothing was counted until `now_ns`, nor in the window: it begins anew."""
        newest = self.newest
        self._readings.clear()
        newest.at_ns = now_ns
        self._readings.append(newest)

    def seconds(self) -> float:
        """Return how long the window is, at least a millisecond."""
        return max(self.newest.at_ns - self._readings[0].at_ns, 1_000_000) / 1e9

    def rate(self, counter: str) -> float:
        """Return events per second of the counter called `counter`."""
        return self.count(counter) / self.seconds()

    def count(self, counter: str) -> int:
        """Return the events of the counter called `counter`."""
        found: int = getattr(self.newest, counter) - getattr(self._readings[0], counter)
        return found

    def quantile_s(self, bounds: Sequence[float], share: float) -> float | None:
        """Return a duration in seconds that `share` of the requests did not exceed; None without requests.

        `bounds` are the histogram's. It knows durations by buckets only: within one, they are taken to be
        spread evenly, as Prometheus does.
        """
        newest, oldest = self.newest.durations, self._readings[0].durations
        if len(oldest) != len(newest):
            oldest = (0,) * len(newest)
        return quantile([new - old for new, old in zip(newest, oldest, strict=True)], bounds, share)

    def stages_ms(self) -> list[float] | None:
        """Return the mean duration of each stage in milliseconds; None without requests."""
        requests = self.count("success")
        if not requests:
            return None
        both = zip(self.newest.stages_ns, self._readings[0].stages_ns, strict=True)
        return [round((new - old) / requests / 1e6, 4) for new, old in both]

    def batches(self) -> list[tuple[int, int]]:
        """Return rows and number of the executions, in the order of rows."""
        before = self._readings[0].batches
        found = [(rows, count - before.get(rows, 0)) for rows, count in self.newest.batches.items()]
        return sorted((rows, count) for rows, count in found if count > 0)


class LanguageReading(msgspec.Struct):
    """The counters of the text that a model version has generated, at one time."""

    at_ns: int
    generation_tokens: int
    prompt_tokens: int
    #: First tokens, and pauses between tokens, by duration, as `Histogram.counts` has them.
    first_tokens: tuple[int, ...]
    inter_tokens: tuple[int, ...]


class LanguageWindow:
    """The readings of one model version over the last `WINDOW_NS`."""

    def __init__(self) -> None:
        self._readings: deque[LanguageReading] = deque()

    def add(self, reading: LanguageReading) -> None:
        """Add a reading, and forget those that are older than the window but the newest of them."""
        readings = self._readings
        readings.append(reading)
        while len(readings) > 2 and readings[1].at_ns <= reading.at_ns - WINDOW_NS:
            readings.popleft()

    def rate(self, counter: str) -> float:
        """Return tokens per second of the counter called `counter`."""
        first, last = self._readings[0], self._readings[-1]
        seconds = max(last.at_ns - first.at_ns, 1_000_000) / 1e9
        tokens: int = getattr(last, counter) - getattr(first, counter)
        return round(tokens / seconds, 2)

    def quantile_ms(self, counts: str, bounds: Sequence[float], share: float) -> float | None:
        """Return milliseconds that `share` of the durations in `counts` did not exceed; None without any."""
        first, last = getattr(self._readings[0], counts), getattr(self._readings[-1], counts)
        found = quantile([new - old for new, old in zip(last, first, strict=True)], bounds, share)
        return None if found is None else round(found * 1000, 3)


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return the value that `share` of the observations in buckets do not exceed; None without observations.

    `counts` has one entry more than `bounds`; a value above all bounds is the last bound.
    """
    total = sum(counts)
    if total <= 0 or not bounds:
        return None
    wanted = total * share
    passed = 0
    for place, count in enumerate(counts):
        if count and passed + count >= wanted:
            if place >= len(bounds):
                break
            begin = bounds[place - 1] if place else 0.0
            return begin + (bounds[place] - begin) * (wanted - passed) / count
        passed += count
    return bounds[-1]
