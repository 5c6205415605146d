"""The last requests of each model that were slow or failed, with their stages, for the dashboard. Pure.

Requests that are neither slow nor failed cost one comparison of two numbers (`ModelStatistics.slow_ns`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kernel.texts import shown_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.errors import ServingError
    from kernel.observe.execution_reports import ExecutionTimes
    from kernel.observe.histogram import Histogram
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request

#: How many slow and how many failed requests of a model are kept, and of how many models.
MOST_OF_MODEL = 12
MOST_MODELS = 256

#: A request that takes less is not slow, whatever other requests take.
LEAST_SLOW_NS = 5_000_000

#: Of the requests of a model, this share is slow at most, about.
_SLOW_SHARE = 0.01

#: After a slow request, others are not noted for this time; equal failures within this time are one entry.
_PAUSE_NS = 100_000_000
_SAME_NS = 1_000_000_000

_MAX_ERROR = 400
_MAX_ID = 128

#: Names of stages, in their order.
PREPARE, QUEUE, INPUT, INFER, OUTPUT, RESPOND = "prepare", "queue", "input", "inference", "output", "respond"
STEPS = "steps"


class RecentRequest(msgspec.Struct):
    """One request, when it was over."""

    #: Grows over all requests of the server.
    number: int
    version: int
    request_id: str
    #: When it ended, in monotonic nanoseconds, and how long it took from its reception.
    ended_ns: int
    total_ns: int
    #: Name, begin and end of each stage, in nanoseconds since the reception. A stage that is not known is left out.
    stages: list[tuple[str, int, int]]
    #: Rows of the request, and of its batch; 0 if there was no batch.
    rows: int
    batch_rows: int = 0
    #: How many requests the batch had, and why it did not wait for more.
    batch_requests: int = 0
    closed_by: str = ""
    #: The name of the instance that had it; empty where that is not known, or it was never dispatched.
    instance: str = ""
    error: str = ""
    #: One of `FAILURE_REASONS`.
    reason: str = ""
    #: How many more requests failed in the same way shortly after.
    repeats: int = 0


class RecentOfModel:
    """The slow and failed requests of the models with one name. It is kept when the model is reloaded."""

    def __init__(self) -> None:
        #: Oldest first.
        self.slow: deque[RecentRequest] = deque(maxlen=MOST_OF_MODEL)
        self.failed: deque[RecentRequest] = deque(maxlen=MOST_OF_MODEL)
        #: Grows with each change.
        self.change = 0
        self._noted_ns = -_PAUSE_NS
        self._failed_ns = 0
        #: When the request of the newest failure was received: how its execution is found.
        self._failed_received_ns = -1

    def note_slow(
        self,
        request: Request,
        version: int,
        now_ns: int,
        batch: Batch | None = None,
        times: ExecutionTimes | None = None,
        instance: str = "",
    ) -> None:
        """Note a request that has succeeded after a long time, unless another one was noted just before.

        `batch` and `times` are left out where they are not known: for ensembles and decoupled models. `instance` is the
        name of the one that had the request.
        """
        if now_ns - self._noted_ns < _PAUSE_NS:
            return
        self._noted_ns = now_ns
        found = self._entry(request, version, now_ns)
        found.instance = instance
        if batch is not None and times is not None:
            _add_execution(found, request, batch, times)
        elif request.composed is not None:
            found.stages = _stages((PREPARE, 0), (STEPS, request.queue_start_ns - request.received_ns), found.total_ns)
        self.slow.append(found)

    def note_failure(
        self,
        request: Request,
        version: int,
        error: ServingError,
        reason: str,
        now_ns: int,
        instance_of: Callable[[Request], str],
    ) -> None:
        """Note a request that failed. Equal failures shortly after one another are one entry.

        `instance_of` returns the name of the instance that has the request.
        """
        self.change += 1
        text = shown_text(error.text.rstrip(), _MAX_ERROR, keep="\n")
        newest = self.failed[-1] if self.failed else None
        if newest is not None and newest.error == text and now_ns - self._failed_ns < _SAME_NS:
            newest.repeats += 1
            return
        self._failed_ns = now_ns
        self._failed_received_ns = request.received_ns
        found = self._entry(request, version, now_ns)
        found.error, found.reason, found.instance = text, reason, instance_of(request)
        if not request.dispatched and request.queue_start_ns:
            begin_ns = request.queue_start_ns - request.received_ns
            found.stages = _stages((PREPARE, 0), (QUEUE, begin_ns), found.total_ns)
        self.failed.append(found)

    def add_execution(self, request: Request, batch: Batch, times: ExecutionTimes) -> None:
        """The batch of a request that has failed before has ended: now its stages are known."""
        if self.failed and request.received_ns == self._failed_received_ns and not self.failed[-1].stages:
            self.change += 1
            _add_execution(self.failed[-1], request, batch, times)

    def _entry(self, request: Request, version: int, now_ns: int) -> RecentRequest:
        self.change += 1
        total_ns = max(now_ns - request.received_ns, 0)
        request_id = shown_text(request.id, _MAX_ID)
        return RecentRequest(_next_number(), version, request_id, now_ns, total_ns, [], request.batch_size)


class RecentRequests:
    """The slow and failed requests of all models."""

    def __init__(self) -> None:
        self._models: dict[str, RecentOfModel] = {}

    def add(self, name: str) -> RecentOfModel:
        """Return where slow and failed requests of a model called `name` are noted, which was loaded now."""
        found = self._models.pop(name, None) or RecentOfModel()
        self._models[name] = found  # the model that was loaded last comes last
        if len(self._models) > MOST_MODELS:
            self._models.pop(next(iter(self._models)))
        return found

    def of(self, name: str) -> RecentOfModel | None:
        """Return the requests of the models called `name`."""
        return self._models.get(name)


def slow_ns(durations: Histogram) -> int:
    """Return how long a request takes that is slower than nearly all of `durations`."""
    counts = durations.cumulative()
    place = bisect_left(counts, counts[-1] * (1 - _SLOW_SHARE))
    bounds = durations.bounds
    bound = bounds[min(place, len(bounds) - 1)] if bounds else 0
    return max(round(bound * durations.scale), LEAST_SLOW_NS)


def _add_execution(found: RecentRequest, request: Request, batch: Batch, times: ExecutionTimes) -> None:
    received_ns = request.received_ns
    found.stages = _stages(
        (PREPARE, 0),
        (QUEUE, request.queue_start_ns - received_ns),
        (INPUT, times.compute_start_ns - received_ns),
        (INFER, times.input_end_ns - received_ns),
        (OUTPUT, times.output_start_ns - received_ns),
        (RESPOND, times.compute_end_ns - received_ns),
        found.total_ns,
    )
    requests = batch.requests
    found.batch_rows = batch.rescheduled_rows + sum(each.batch_size for each in requests)
    found.batch_requests = len(requests)
    found.closed_by = batch.closed_by
    found.instance = batch.instance or found.instance


def _stages(*parts: tuple[str, int] | int) -> list[tuple[str, int, int]]:
    """Return the stages whose names and begins are given, and the end of the last one; empty stages are left out.

    None begins before the one before it: clocks of processes differ by some microseconds.
    """
    end_ns = parts[-1]
    assert isinstance(end_ns, int)
    found: list[tuple[str, int, int]] = []
    begun = [part for part in parts if isinstance(part, tuple)]
    at_ns = 0
    for place, (name, _) in enumerate(begun):
        next_ns = begun[place + 1][1] if place + 1 < len(begun) else end_ns
        next_ns = min(max(next_ns, at_ns), max(end_ns, at_ns))
        if next_ns > at_ns:
            found.append((name, at_ns, next_ns))
        at_ns = next_ns
    return found


class _Counter:
    """The number of the last request that was noted."""

    last = 0


def _next_number() -> int:
    _Counter.last += 1
    return _Counter.last
