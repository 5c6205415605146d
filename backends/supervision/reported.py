"""What a worker's backend reports about executions: held until the batch ends, then counted in the statistics.

A report can come after the end of the batch, from a backend that responds later. Its request was counted with the
times of the batch then, and is counted again. Pure.

Traces of requests that a worker executes: what the kernel sends to the worker, and what it adds from its reports.

Adds the custom metrics that one worker reports to the metrics of the model version.

Reports are not trusted: a report that breaks the protocol raises ValueError, which ends the worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from backends.transport import wire
from kernel.errors import InvalidArgument
from kernel.observe.custom_metrics import TooManySeries
from kernel.observe.execution_reports import ExecutionTimes, MemoryUsage, ReportedExecution, ReportedRequest
from kernel.observe.metric_rules import MetricKind, check_buckets, check_family_name, checked_labels
from kernel.observe.statistics import OUTCOMES, CountedRequest, correct_request, record_reported_response
from kernel.records.trace import TRACED_BYTE_SIZE, TracedExecution
from kernel.serving.batch import BatchReports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernel.observe.custom_metrics import CustomFamily, CustomMetrics, CustomSeries
    from kernel.observe.metric_rules import Labels
    from kernel.observe.statistics import ModelStatistics
    from kernel.records.trace import Trace, TracedTensor
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request

#: The most kinds and devices in one report of memory.
_MAX_USES = 256


class ReportedStatistics:
    """The reports of one worker, by the numbers of requests and batches in its messages."""

    def __init__(self, title: str, statistics: ModelStatistics, pid: int = 0) -> None:
        """`pid` is the id of the worker's process; 0 if it is on another machine."""
        self._title = title
        self._statistics = statistics
        #: Whether there are reports for a batch that has not ended.
        self.pending = False
        self._requests: dict[int, ReportedRequest] = {}
        self._executions: dict[int, list[ReportedExecution]] = {}
        #: Requests whose batch has ended, and that have no final response, by number.
        self.open: dict[int, CountedRequest] = {}
        statistics.memory.worker_started(title, pid)

    def take(
        self, message: wire.Reported, requests: Mapping[int, Request], batches: Mapping[int, Batch], offset_ns: int
    ) -> None:
        """Count reported responses, correct what was counted, and keep other reports for the end of their batch.

        `requests` have no final response, `batches` have not ended; a report about others is dropped. `offset_ns` is
        added to the worker's times. Raises ValueError for a report that breaks the protocol.
        """
        for report in message.requests:
            found = ReportedRequest(_times(report.times, offset_ns), report.success)
            counted = self.open.pop(report.request, None)
            if counted is None:
                if any(_has(batch, report.request) for batch in batches.values()):
                    self._requests[report.request] = found
                    self.pending = True
            elif (request := requests.get(report.request)) is not None:
                correct_request(self._statistics, request, counted, found)
        if message.batch in batches:
            executions = self._executions.setdefault(message.batch, [])
            executions += [ReportedExecution(each.rows, _times(each.times, offset_ns)) for each in message.batches]
            self.pending = True
        for response in message.responses:
            if response.outcome not in OUTCOMES or not response.start_ns <= response.output_start_ns <= response.end_ns:
                raise ValueError(f"a report of a response with the outcome '{response.outcome}'")
            record_reported_response(
                self._statistics, response.index, response.outcome,
                response.start_ns, response.output_start_ns, response.end_ns,
            )  # fmt: skip

    def of_batch(self, batch: Batch) -> BatchReports | None:
        """Return what was reported about a batch that ends now, and forget it. None if nothing was."""
        requests: dict[Request, ReportedRequest] = {}
        for number, request in zip(batch.request_numbers(), batch.requests, strict=True):
            report = self._requests.pop(number, None)
            if report is not None:
                requests[request] = report
        for number in range(batch.first_request_number, batch.first_request_number + len(batch.entries)):
            self._requests.pop(number, None)  # of requests that were given back
        executions = self._executions.pop(batch.number, [])
        self.pending = bool(self._requests or self._executions)
        return BatchReports(requests, executions) if requests or executions else None

    def counted(self, batch: Batch, times: ExecutionTimes, now_ns: int, requests: Mapping[int, Request]) -> None:
        """A batch has ended; those of its requests that are in `requests` have no final response yet."""
        for number in batch.request_numbers():
            if number in requests:
                self.open[number] = CountedRequest(times, now_ns)

    def take_memory(self, message: wire.MemoryUsed) -> None:
        """Note the memory that the instance uses. Raises ValueError for a report that breaks the protocol."""
        if len(message.uses) > _MAX_USES:
            raise ValueError(f"a report of memory with {len(message.uses)} kinds and devices")
        self._statistics.memory.report(
            self._title, [MemoryUsage(use.kind, use.device_id, use.byte_size) for use in message.uses]
        )

    def end(self) -> None:
        """The worker has ended."""
        self._statistics.memory.forget(self._title)


def _has(batch: Batch, number: int) -> bool:
    return batch.first_request_number <= number < batch.first_request_number + len(batch.entries)


def _times(times: wire.StageTimes, offset_ns: int) -> ExecutionTimes:
    """Return reported times on the kernel's clock. Raises ValueError if they are not in order."""
    if not times.start_ns <= times.input_end_ns <= times.output_start_ns <= times.end_ns:
        raise ValueError("reported times that are not in order")
    return ExecutionTimes(
        times.start_ns + offset_ns, times.input_end_ns + offset_ns,
        times.output_start_ns + offset_ns, times.end_ns + offset_ns,
    )  # fmt: skip


#: The most tensors that a worker may send for a request at a time: more than any model has.
_MOST_TENSORS = 4096


#: What most requests with a trace carry to the worker.
OF_TIMES, _OF_TENSORS = wire.TraceContext(), wire.TraceContext(tensors=True)


def trace_context(trace: Trace) -> wire.TraceContext:
    """Return what the worker gets to know of a trace that is not usual, and whose request it executes."""
    spans = trace.spans
    if spans is None:
        return OF_TIMES if trace.tensors is None else _OF_TENSORS
    return wire.TraceContext(trace.traceparent, spans.state)


def trace_execution(batch: Batch, times: ExecutionTimes, instance: str, message: wire.Executed) -> None:
    """Add an execution to the traces of the requests of its batch that are not usual, before these get their responses.

    The usual ones find it in the batch.
    """
    execution: TracedExecution | None = None
    for request in batch.entries:
        if request is not None and (trace := request.trace) is not None and not trace.usual:
            if trace.explains:
                if execution is None:
                    rows = batch.rescheduled_rows + sum(each.batch_size for each in batch.requests)
                    execution = TracedExecution(
                        times, batch, instance, message.copies, message.copied_byte_size, rows, len(batch.requests)
                    )
                trace.execution = execution
            trace.executed(times)


def end_traces(batch: Batch) -> None:
    """Note that a lost worker does not execute the requests of `batch` any more."""
    if batch.traced:
        for request in batch.requests:
            if request.trace is not None:
                request.trace.not_executed()


def add_traced_tensors(request: Request | None, tensors: list[TracedTensor]) -> None:
    """Add tensors to the trace of a request. Raises ValueError for a request that is not being traced so."""
    trace = None if request is None else request.trace
    if trace is None or trace.tensors is None or len(tensors) > _MOST_TENSORS:
        raise ValueError("tensors of a request whose tensors are not traced")
    if any(len(tensor.data) > TRACED_BYTE_SIZE for tensor in tensors):
        raise ValueError(f"more than {TRACED_BYTE_SIZE} bytes of a traced tensor")
    trace.add_tensors(tensors)


logger = logging.getLogger(__name__)


class _HeldSeries(msgspec.Struct, frozen=True):
    """A series of the worker. `series` is None if the model version has reached its limit of series."""

    family: CustomFamily
    labels: Labels
    bounds: list[float]
    series: CustomSeries | None


class ReportedMetrics:
    """The metrics of one worker, by the worker's numbers."""

    def __init__(self, title: str, metrics: CustomMetrics) -> None:
        """`title` is the name of the instance in the log."""
        self._title = title
        self._metrics = metrics
        self._families: dict[str, CustomFamily] = {}
        self._held: dict[int, _HeldSeries] = {}
        self._limit_logged = False

    def take(self, message: wire.MetricsChanged, now_ns: int) -> None:
        """Apply a report. Raises ValueError for one that breaks the protocol."""
        try:
            for family in message.families:
                self._define(family)
            for created in message.created:
                self._hold(created)
        except InvalidArgument as error:
            raise ValueError(error.message) from error
        for change in message.changes:
            self._change(change, now_ns)
        for number in message.removed:
            held = self._known(number)
            del self._held[number]
            if held.series is not None:
                self._metrics.release(held.family, held.labels)

    def end(self) -> None:
        """The worker has ended: release its series."""
        held, self._held = self._held, {}
        for each in held.values():
            if each.series is not None:
                self._metrics.worker_ended(each.family, each.labels)

    def _define(self, ref: wire.MetricFamilyRef) -> None:
        check_family_name(ref.name)
        self._families[ref.name] = self._metrics.define(ref.name, ref.description, MetricKind(ref.kind))

    def _hold(self, ref: wire.MetricSeriesRef) -> None:
        if ref.number in self._held:
            raise ValueError(f"metric {ref.number} exists")
        family = self._families.get(ref.family)
        if family is None:
            raise ValueError(f"there is no metric family '{ref.family}'")
        labels = checked_labels(ref.labels, family.kind)
        check_buckets(ref.buckets)
        try:
            series = self._metrics.hold(family, labels, ref.buckets)
        except TooManySeries:
            self._log_limit()
            series = None
        self._held[ref.number] = _HeldSeries(family, labels, ref.buckets, series)

    def _change(self, change: wire.MetricChange, now_ns: int) -> None:
        held = self._known(change.series)
        kind, series = held.family.kind, held.series
        if kind is MetricKind.HISTOGRAM:
            if len(change.counts) != len(held.bounds) + 1 or any(count < 0 for count in change.counts):
                raise ValueError(f"{len(change.counts)} buckets of a histogram with {len(held.bounds)} bounds")
        elif kind is MetricKind.COUNTER and (change.absolute or change.added < 0):
            raise ValueError("a change of a counter that does not increase it")
        if series is None:
            return
        series.changed_ns = now_ns
        if series.histogram is not None:
            series.observe(held.bounds, change.counts, change.added)
        else:
            series.value = change.added if change.absolute else series.value + change.added

    def _known(self, number: int) -> _HeldSeries:
        held = self._held.get(number)
        if held is None:
            raise ValueError(f"there is no metric {number}")
        return held

    def _log_limit(self) -> None:
        if not self._limit_logged:
            self._limit_logged = True
            logger.error("model instance '%s' has more metrics than a model may have; some are left out", self._title)
