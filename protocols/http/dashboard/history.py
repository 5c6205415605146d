"""The last two minutes of the server and of its models, so that a page that is opened after an incident shows it. Pure.

Every two seconds a sample is taken from counters that grow anyhow, also while no page is open. The memory is bounded: a
model takes 1 KiB while it had requests in these two minutes, and of at most `MOST_MODELS` models that much is kept.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import msgspec

from protocols.http.dashboard.windows import quantile

if TYPE_CHECKING:
    from kernel.serving.model_figures import ModelCounters

#: How many samples are kept.
SAMPLES = 60

#: Of how many models.
MOST_MODELS = 1000

#: Figures of the server in a sample, and of a model. Durations are NaN where there was no request.
SERVER_FIGURES = ("rate", "failure_rate", "queue", "tensor_byte_size", "cpu")
MODEL_FIGURES = ("rate", "failure_rate", "p50_ms", "p99_ms")

Figures = dict[str, list[float | None]]


class ShownHistory(msgspec.Struct, frozen=True):
    """The samples that there are, oldest first: how long ago each was taken, and its figures by name."""

    ages_ms: list[int]
    server: Figures
    #: Of the chosen model; None if it had no request.
    model: Figures | None


class ServerSample(msgspec.Struct, frozen=True):
    """What a sample has of the whole server; its rates are sums over models."""

    queue: int
    tensor_byte_size: int
    #: Processor time of this process until now, in seconds.
    cpu_s: float


class ModelHistory:
    """The counters of a model version at its last sample, and its samples if it had requests."""

    __slots__ = ("durations", "failed", "last_active", "samples", "success")

    def __init__(self, model: ModelCounters) -> None:
        statistics = model.statistics
        self.success = statistics.success.count
        self.failed = statistics.fail.count + statistics.refused
        self.durations = tuple(statistics.durations.counts) if self.success else ()
        #: `MODEL_FIGURES` of each sample, in a ring.
        self.samples: array[float] | None = None
        #: The number of the last sample in which it had requests.
        self.last_active = 0


class History:
    """The samples of a server, in rings. For a sample, call `begin`, `add` for each model, and `end`."""

    def __init__(self) -> None:
        #: How many samples were taken.
        self.number = 0
        self._at_ns = array("q", bytes(8 * SAMPLES))
        self._server = array("f", bytes(4 * SAMPLES * len(SERVER_FIGURES)))
        self._models: dict[tuple[str, str], ModelHistory] = {}
        self._kept = 0
        self._seen: dict[tuple[str, str], ModelHistory] = {}
        self._last_ns = 0
        self._last_cpu_s = math.nan
        self._seconds = math.inf
        self._rate = self._failure_rate = 0.0

    def begin(self, now_ns: int) -> None:
        """Begin a sample."""
        # Before the first one, nothing is known of how long the counters have been growing.
        self._seconds = max((now_ns - self._last_ns) / 1e9, 0.001) if self._last_ns else math.inf
        self._last_ns = now_ns
        self._at_ns[self.number % SAMPLES] = now_ns
        self._rate = self._failure_rate = 0.0
        self._seen = {}

    def add(self, model: ModelCounters) -> None:
        """Add a loaded model version to the sample. Those without requests cost half a microsecond."""
        key = (model.spec.name, model.version_text)
        statistics = model.statistics
        success, failed = statistics.success.count, statistics.fail.count + statistics.refused
        found = self._models.get(key)
        if found is None or success < found.success or failed < found.failed:  # new, or loaded again
            samples = None if found is None else found.samples
            found = ModelHistory(model)
            found.samples, found.last_active = samples, self.number if samples is not None else 0
        self._seen[key] = found
        if found.samples is None and success == found.success and failed == found.failed:
            return
        self._add_active(found, model, success, failed)

    def _add_active(self, found: ModelHistory, model: ModelCounters, success: int, failed: int) -> None:
        succeeded, lost = success - found.success, failed - found.failed
        if succeeded or lost:
            found.last_active = self.number
        elif self.number - found.last_active >= SAMPLES:
            found.samples = None
            self._kept -= 1
            return
        if found.samples is None:
            if self._kept >= MOST_MODELS:
                found.success, found.failed = success, failed
                return
            self._kept += 1
            found.samples = array("f", (0.0, 0.0, math.nan, math.nan) * SAMPLES)
        halves = tails = math.nan
        durations = found.durations
        if succeeded:
            durations = tuple(model.statistics.durations.counts)
            before = found.durations or (0,) * len(durations)
            counts = [now - then for now, then in zip(durations, before, strict=True)]
            bounds = model.statistics.durations.bounds
            halves, tails = (_ms(quantile(counts, bounds, share)) for share in (0.5, 0.99))
        rate, failure_rate = (succeeded + lost) / self._seconds, lost / self._seconds
        self._rate += rate
        self._failure_rate += failure_rate
        place = self.number % SAMPLES * len(MODEL_FIGURES)
        found.samples[place : place + len(MODEL_FIGURES)] = array("f", (rate, failure_rate, halves, tails))
        found.success, found.failed, found.durations = success, failed, durations

    def end(self, server: ServerSample) -> None:
        """End a sample. Models that are gone keep what they have until it is old."""
        for key, found in self._models.items():
            if key not in self._seen and found.samples is not None:
                if self.number - found.last_active >= SAMPLES:
                    self._kept -= 1
                    continue
                place = self.number % SAMPLES * len(MODEL_FIGURES)
                found.samples[place : place + len(MODEL_FIGURES)] = array("f", (0.0, 0.0, math.nan, math.nan))
                self._seen[key] = found
        self._models = self._seen
        cpu = (server.cpu_s - self._last_cpu_s) / self._seconds
        self._last_cpu_s = server.cpu_s
        place = self.number % SAMPLES * len(SERVER_FIGURES)
        self._server[place : place + len(SERVER_FIGURES)] = array(
            "f",
            (self._rate, self._failure_rate, server.queue, server.tensor_byte_size, 0.0 if math.isnan(cpu) else cpu),
        )
        self.number += 1

    def shown(self, now_ns: int, chosen: tuple[str, str] | None) -> ShownHistory:
        """Return the samples that are complete; `chosen` is the name and version of a model."""
        numbers = range(max(self.number - SAMPLES, 0), self.number)
        model = None if chosen is None else self._models.get(chosen)
        return ShownHistory(
            [max(now_ns - self._at_ns[number % SAMPLES], 0) // 1_000_000 for number in numbers],
            _figures(self._server, SERVER_FIGURES, numbers),
            None if model is None or model.samples is None else _figures(model.samples, MODEL_FIGURES, numbers),
        )


def _figures(samples: array[float], names: tuple[str, ...], numbers: range) -> Figures:
    return {
        name: [_json(samples[number % SAMPLES * len(names) + place]) for number in numbers]
        for place, name in enumerate(names)
    }


def _json(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _ms(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds * 1000
