"""The services of a worker for a backend under test, which record what the backend does with them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from backends.base import Timings
from backends.worker.custom_metrics import MetricRegistry
from backends.worker.reports import ReportCollector
from tests.backends.recorded_calls import RecordedCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.transport import wire
    from backends.worker.request import WorkerRequest


class RecordedHost:
    """Implements `Host`, and what of `Responder` is the same for all labs. There is no GPU."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, str]] = []
        #: The requests that are too far ahead of their clients, and what is called when they are no more.
        self.ahead: dict[int, Callable[[], object] | None] = {}
        self.rescheduled: list[WorkerRequest] = []
        self.timings = Timings(0, 0, 0, itertools.count(1).__next__)
        self.registry = MetricRegistry(lambda: None, lambda: None)
        #: What the backend has reported.
        self.reported: list[wire.ToKernel] = []
        self.collector = ReportCollector(self.reported.append, self.log)
        self.recorded_calls = RecordedCalls()

    def reschedule(self, request: WorkerRequest) -> None:
        request.finished = True
        self.rescheduled.append(request)

    def is_ahead(self, request: WorkerRequest) -> bool:
        return request.ref.number in self.ahead

    def when_taken(self, request: WorkerRequest, callback: Callable[[], object]) -> None:
        self.ahead[request.ref.number] = callback

    @property
    def reports(self) -> ReportCollector:
        return self.collector

    def log(self, level: str, text: str) -> None:
        self.logged.append((level, text))

    @property
    def metrics(self) -> MetricRegistry:
        return self.registry

    def report_memory(self, uses: Sequence[tuple[str, int, int]]) -> None:
        self.collector.memory(uses)

    @property
    def device(self) -> None:
        return None

    @property
    def calls(self) -> RecordedCalls:
        return self.recorded_calls
