"""Counts and durations of the requests of a model version: plain integers, rendered only for responses. Pure.

Meanings are Triton's (statistics extension): `inference_count` counts rows, `execution_count` counts batches. A
failed request counts only as failure. Durations are in nanoseconds.

A backend may report statistics itself. A request or an execution that it has reported counts with the reported times;
any other with the times that its worker has measured. So a backend that reports nothing has the same counts as one that
reports everything.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import QueueFull, QueueTimeout, QuotaExceeded, RequestCancelled
from kernel.observe.custom_metrics import CustomMetrics
from kernel.observe.execution_reports import ExecutionTimes, InstanceMemory, ReportedExecution
from kernel.observe.histogram import LOOK_NS, Exemplars, Histogram, SlidingQuantiles
from kernel.observe.metrics_config import DEFAULT_BUCKETS, FIRST_RESPONSE, REQUEST_DURATION, MetricsConfig, buckets_of
from kernel.observe.recent_requests import LEAST_SLOW_NS, slow_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.errors import ServingError
    from kernel.observe.execution_reports import ReportedRequest
    from kernel.observe.recent_requests import RecentOfModel
    from kernel.serving.batch import Batch, BatchReports
    from kernel.serving.request import Request
    from kernel.serving.response import Response

#: The values of the label `reason` of nv_inference_request_failure.
FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")

#: Longer than any request: the limit if the dashboard is disabled, so that no request counts as slow.
NEVER_NS = 1 << 63

_NS_PER_MS = 1_000_000

_NS_PER_S = 1_000_000_000


class Duration(msgspec.Struct):
    """A number of events, and the sum of their durations."""

    count: int = 0
    ns: int = 0


class BatchStatistics(msgspec.Struct):
    """The executions with one batch size: their number, and the sums of their durations by stage."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


class ResponseStatistics(msgspec.Struct):
    """The statistics that a backend reports for the responses with one index. Reporting is optional, as in Triton."""

    compute_infer: Duration = msgspec.field(default_factory=Duration)
    compute_output: Duration = msgspec.field(default_factory=Duration)
    success: Duration = msgspec.field(default_factory=Duration)
    fail: Duration = msgspec.field(default_factory=Duration)
    empty_response: Duration = msgspec.field(default_factory=Duration)
    cancel: Duration = msgspec.field(default_factory=Duration)


class Summaries:
    """Quantiles of the durations of requests by stage, in microseconds. They exist only if the settings enable them."""

    def __init__(self) -> None:
        self.request = SlidingQuantiles()
        self.queue = SlidingQuantiles()
        self.compute_input = SlidingQuantiles()
        self.compute_infer = SlidingQuantiles()
        self.compute_output = SlidingQuantiles()
        self.cache_hit = SlidingQuantiles()
        self.cache_miss = SlidingQuantiles()


class ExecutionObserver(Protocol):
    """Sees the executions of a model version. Implemented by `kernel.traffic.rollout_trial`."""

    def executed(self, batch: Batch, times: ExecutionTimes) -> None:
        """An execution has ended."""

    def composed(self, request: Request, duration_ns: int) -> None:
        """The steps of an ensemble have executed a request."""

    def failed(self, request: Request, error: ServingError) -> None:
        """A request has failed."""


class ModelStatistics:
    """The counters of one model version. They start at 0 with each load."""

    #: Sees the executions of a version of a rollout; None for most versions.
    observer: ExecutionObserver | None = None

    def __init__(self, *, decoupled: bool = False) -> None:
        #: `record_response` observes each response; otherwise `record_execution` observes all of them.
        self.decoupled = decoupled
        self.inference_count = 0
        self.execution_count = 0
        #: Nanoseconds since the epoch of the last execution, 0 before the first.
        self.last_inference_ns = 0
        #: Requests that succeeded, and their durations from reception to response.
        self.success = Duration()
        #: The parts of these durations.
        self.queue_ns = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0
        self.fail = Duration()
        self.failures: dict[str, int] = dict.fromkeys(FAILURE_REASONS, 0)
        #: Whether the model has a response cache.
        self.cached = False
        self.cache_hit = Duration()
        self.cache_miss = Duration()
        #: Batch size in rows → executions.
        self.batches: defaultdict[int, BatchStatistics] = defaultdict(BatchStatistics)
        #: Index of a response among the responses of its request → statistics.
        self.responses: defaultdict[str, ResponseStatistics] = defaultdict(ResponseStatistics)
        #: The memory that instances use, as their backends report it.
        self.memory = InstanceMemory()
        #: Requests that a full queue refused. They were never accepted, and no other counter contains them.
        self.refused = 0
        #: How often a worker of this version died, and how often a dead worker was replaced.
        self.workers_lost = 0
        self.workers_restarted = 0
        #: How often a worker was ended because an execution took longer than its timeout.
        self.execution_timeouts = 0
        #: How many instances `naiad.autoscale` has chosen, None without it, and how many it has added and removed.
        self.autoscale_instances: int | None = None
        self.autoscaled_up = 0
        self.autoscaled_down = 0
        self.load_ns = 0
        #: Large tensors that workers have copied before or after the model, and their bytes.
        self.copied_tensors = self.copied_byte_size = 0
        #: From reception to the final response, of requests that succeeded.
        self.durations = Histogram(DEFAULT_BUCKETS[REQUEST_DURATION], _NS_PER_S)
        #: From reception to the first response that is not an error; None if the settings do not enable it.
        self.first_responses: Histogram | None = None
        self.summaries: Summaries | None = None
        #: Traced requests in `durations` and in `first_responses`; None before the first.
        self.exemplars: Exemplars | None = None
        self.first_exemplars: Exemplars | None = None
        #: Before this time `record_traced` need not be called, in monotonic nanoseconds: to check each of many requests
        #: is slow.
        self.exemplars_look_ns = 0
        #: The metrics that the model defines.
        self.custom = CustomMetrics()
        #: A request that takes longer is noted in `recent`, and so is one that fails; None if the dashboard is
        #: disabled.
        self.slow_ns = NEVER_NS
        self.recent: RecentOfModel | None = None
        self._instance_of: Callable[[Request], str] = _no_instance
        self._version = 0

    def configure(self, metrics: MetricsConfig, config: ModelConfig) -> list[str]:
        """Create the histograms and quantiles that `metrics` and the model's `config` enable.

        Call it before the first request. Returns a log line for each setting without effect.
        """
        buckets, complaints = buckets_of(config)
        self.durations = Histogram(buckets[REQUEST_DURATION], _NS_PER_S)
        if metrics.histogram_latencies:
            self.first_responses = Histogram(buckets[FIRST_RESPONSE])
        if metrics.summary_latencies:
            self.summaries = Summaries()
        return complaints

    def note_requests(
        self, recent: RecentOfModel, version: int, instance_of: Callable[[Request], str] | None = None
    ) -> None:
        """Note requests of this `version` that are slow or fail in `recent`.

        `instance_of` returns the name of the instance that has a request without its final response; empty for none.
        """
        self.recent = recent
        self._instance_of = instance_of or _no_instance
        self._version = version
        self.slow_ns = LEAST_SLOW_NS

    def note_slow(
        self, request: Request, now_ns: int, batch: Batch | None = None, times: ExecutionTimes | None = None
    ) -> None:
        """Note a request that has taken longer than `slow_ns`; see `RecentOfModel.note_slow`."""
        if self.recent is not None:
            instance = self._instance_of(request) if batch is None else batch.instance
            self.recent.note_slow(request, self._version, now_ns, batch, times, instance)
            self.slow_ns = slow_ns(self.durations)

    def record_execution(self, batch: Batch, times: ExecutionTimes, now_ns: int, wall_ns: int) -> None:
        """Count an execution that has ended, and all its requests that have not failed."""
        start_ns = times.compute_start_ns
        input_ns = times.input_end_ns - start_ns
        infer_ns = times.output_start_ns - times.input_end_ns
        output_ns = times.compute_end_ns - times.output_start_ns
        self.execution_count += 1
        self.last_inference_ns = wall_ns
        success = self.success
        rows = batch.rescheduled_rows
        if rows:  # as in Triton, each execution of a request counts
            self.inference_count += rows
        for request in batch.entries:
            if request is None:  # padding
                continue
            rows += request.batch_size
            if request.parent is not None:
                add_to_ensembles(request.parent, input_ns, infer_ns, output_ns)
            if request.failed:
                if self.recent is not None:
                    self.recent.add_execution(request, batch, times)
                continue
            self.inference_count += request.batch_size
            duration_ns = now_ns - request.received_ns
            waited_ns = start_ns - request.queue_start_ns
            success.count += 1
            success.ns += duration_ns
            if waited_ns > 0:
                self.queue_ns += waited_ns
            self.input_ns += input_ns
            self.infer_ns += infer_ns
            self.output_ns += output_ns
            if not self.decoupled:
                self.durations.observe(duration_ns)  # repeats `observe_duration`, to save a call for each request
                if self.first_responses is not None:
                    self.first_responses.observe(duration_ns // _NS_PER_MS)
                if duration_ns > self.slow_ns:
                    self.note_slow(request, now_ns, batch, times)
            if self.summaries is not None:
                summarize(self.summaries, duration_ns, max(waited_ns, 0), times, now_ns)
        size = self.batches[rows]
        size.count += 1
        size.input_ns += input_ns
        size.infer_ns += infer_ns
        size.output_ns += output_ns
        if self.observer is not None:
            self.observer.executed(batch, times)

    def observe_duration(self, duration_ns: int) -> None:
        """Observe how long a request with one response took that has succeeded."""
        self.durations.observe(duration_ns)
        if self.first_responses is not None:
            self.first_responses.observe(duration_ns // _NS_PER_MS)

    def record_composed(self, request: Request, started_ns: int, now_ns: int, wall_ns: int) -> None:
        """Count a request that the steps of an ensemble have executed, and that did not fail."""
        duration_ns = now_ns - request.received_ns
        self.execution_count += 1
        self.inference_count += request.batch_size
        self.last_inference_ns = wall_ns
        if self.observer is not None:
            self.observer.composed(request, duration_ns)
        self.success.count += 1
        self.success.ns += duration_ns
        self.queue_ns += started_ns - request.queue_start_ns
        size = self.batches[request.batch_size]
        size.count += 1
        composed = request.composed
        if composed is not None:
            composed.count_in(self, size)
        if not self.decoupled:
            self.observe_duration(duration_ns)
            if duration_ns > self.slow_ns:
                self.note_slow(request, now_ns)
        if self.summaries is not None and composed is not None:
            # Times of the last step are not known yet: it has just sent its response.
            inferred_ns = composed.input_ns + composed.infer_ns
            times = ExecutionTimes(0, composed.input_ns, inferred_ns, inferred_ns + composed.output_ns)
            summarize(self.summaries, duration_ns, started_ns - request.queue_start_ns, times, now_ns)

    def record_cache_hit(self, request: Request, lookup_start_ns: int, now_ns: int) -> None:
        """Count a request that got its response from the response cache. It succeeds without an execution (Triton)."""
        duration_ns, lookup_ns = now_ns - request.received_ns, now_ns - lookup_start_ns
        _add(self.success, duration_ns)
        _add(self.cache_hit, lookup_ns)
        self.observe_duration(duration_ns)
        if self.summaries is not None:
            self.summaries.request.observe(duration_ns // 1000, now_ns)
            self.summaries.queue.observe(0, now_ns)
            self.summaries.cache_hit.observe(lookup_ns // 1000, now_ns)

    def record_traced(self, duration_ns: int, trace_id: str, now_ns: int) -> None:
        """Keep a traced request, which is counted apart, as the example of its bucket, if that needs a new one."""
        self.exemplars_look_ns = now_ns + LOOK_NS
        if self.exemplars is None:
            self.exemplars = Exemplars(self.durations)
        if not self.exemplars.due(duration_ns, now_ns):
            return
        self.exemplars.note(duration_ns, trace_id, now_ns)
        if not self.decoupled:
            self._note_first(duration_ns, trace_id, now_ns)

    def _note_first(self, duration_ns: int, trace_id: str, now_ns: int) -> None:
        """Keep a traced request as the example of how long its first response took."""
        if self.first_responses is not None:
            if self.first_exemplars is None:
                self.first_exemplars = Exemplars(self.first_responses)
            self.first_exemplars.note(duration_ns // _NS_PER_MS, trace_id, now_ns)

    def record_cache_miss(self, took_ns: int, now_ns: int) -> None:
        """Count a request that the response cache did not find. `took_ns`: to look it up and to store its response."""
        self.cache_miss.count += 1
        self.cache_miss.ns += took_ns
        if self.summaries is not None:
            self.summaries.cache_miss.observe(took_ns // 1000, now_ns)

    def record_response(self, request: Request, response: Response, now_ns: int) -> None:
        """Observe a response of a decoupled model, which may respond at any time."""
        if self.first_responses is not None and request.response_count == 1 and response.outputs is not None:
            first_ns, trace = now_ns - request.received_ns, request.trace
            self.first_responses.observe(first_ns // _NS_PER_MS)
            if trace is not None and trace.output is not None:  # it is written
                self._note_first(first_ns, trace.trace_id, now_ns)
        if response.final and not request.failed:
            duration_ns = now_ns - request.received_ns
            self.durations.observe(duration_ns)
            if duration_ns > self.slow_ns:
                self.note_slow(request, now_ns)

    def record_failure(self, request: Request, error: ServingError, now_ns: int) -> None:
        """Count a request that failed with `error`. As in Triton, a request refused by a full queue is not a failure.

        Nor is one that its client's quota refused.
        """
        if isinstance(error, (QueueFull, QuotaExceeded)):
            self.refused += 1
            return
        self.fail.count += 1
        self.fail.ns += now_ns - request.received_ns
        reason = _reason(request, error)
        self.failures[reason] += 1
        if self.observer is not None:
            self.observer.failed(request, error)
        if self.recent is not None:
            self.recent.note_failure(request, self._version, error, reason, now_ns, self._instance_of)


def add_to_ensembles(parent: Request | None, input_ns: int, infer_ns: int, output_ns: int) -> None:
    """Add the times of a step to the ensemble `parent`, and to the ensembles of which that one is a step.

    A model that calls others has its own times, which contain the times of the calls.
    """
    while parent is not None and parent.composed is not None:
        parent.composed.add(input_ns, infer_ns, output_ns)
        parent = parent.parent


def summarize(summaries: Summaries, duration_ns: int, waited_ns: int, times: ExecutionTimes, now_ns: int) -> None:
    """Add a request that has succeeded to the quantiles."""
    summaries.request.observe(duration_ns // 1000, now_ns)
    summaries.queue.observe(waited_ns // 1000, now_ns)
    summaries.compute_input.observe((times.input_end_ns - times.compute_start_ns) // 1000, now_ns)
    summaries.compute_infer.observe((times.output_start_ns - times.input_end_ns) // 1000, now_ns)
    summaries.compute_output.observe((times.compute_end_ns - times.output_start_ns) // 1000, now_ns)


def _no_instance(request: Request) -> str:
    """Return that the instance is not known."""
    return ""


def _reason(request: Request, error: ServingError) -> str:
    if isinstance(error, QueueTimeout):
        return "REJECTED"
    if isinstance(error, RequestCancelled):
        return "CANCELED"
    return "BACKEND" if request.dispatched else "OTHER"


#: What a backend may report a response as. The statistics have the same names.
OUTCOMES = ("success", "fail", "empty_response", "cancel")


class CountedRequest(msgspec.Struct, frozen=True):
    """With which times a request was counted at the end of its batch, and when."""

    times: ExecutionTimes
    now_ns: int


def record_reported(
    statistics: ModelStatistics, batch: Batch, reports: BatchReports, times: ExecutionTimes, now_ns: int, wall_ns: int
) -> None:
    """Count an execution that has ended and its requests, as `ModelStatistics.record_execution`, with `reports`."""
    statistics.last_inference_ns = wall_ns
    rows = batch.rescheduled_rows
    statistics.inference_count += rows
    for request in batch.requests:
        rows += request.batch_size
        report = reports.requests.get(request)
        own = times if report is None else report.times
        if request.parent is not None:
            add_to_ensembles(request.parent, *_stages(own))
        if request.failed:
            if statistics.recent is not None:
                statistics.recent.add_execution(request, batch, own)
            continue
        if report is not None and not report.success:
            _count_failure(statistics, request, now_ns)
        else:
            _count_success(statistics, request, own, now_ns)
            if not statistics.decoupled and now_ns - request.received_ns > statistics.slow_ns:
                statistics.note_slow(request, now_ns, batch, own)
    for execution in reports.executions or [ReportedExecution(rows, times)]:
        _count_execution(statistics, min(execution.rows, rows), execution.times)


def correct_request(
    statistics: ModelStatistics, request: Request, counted: CountedRequest, report: ReportedRequest
) -> None:
    """Count `request` with `report`, which came after the end of its batch. Its quantiles stay as they are."""
    if request.failed:
        return
    _add_times(statistics, request, counted.times, -1)
    if report.success:
        _add_times(statistics, request, report.times, 1)
        return
    statistics.inference_count -= request.batch_size
    statistics.success.count -= 1
    statistics.success.ns -= counted.now_ns - request.received_ns
    _count_failure(statistics, request, counted.now_ns)


def record_reported_response(
    statistics: ModelStatistics, index: int, outcome: str, start_ns: int, output_start_ns: int, end_ns: int
) -> None:
    """Count a response, by its index among the responses of its request. `outcome` is one of `OUTCOMES`.

    As in Triton, an empty or cancelled response has no output stage, nor has a failed one that took no time for it.
    """
    found = statistics.responses[str(index)]
    if outcome == "cancel":
        _add(found.cancel, end_ns - start_ns)
        return
    if outcome == "empty_response":
        _add(found.compute_infer, end_ns - start_ns)
        _add(found.empty_response, end_ns - start_ns)
        return
    _add(found.compute_infer, output_start_ns - start_ns)
    if outcome == "success" or end_ns > output_start_ns:
        _add(found.compute_output, end_ns - output_start_ns)
    _add(found.success if outcome == "success" else found.fail, end_ns - start_ns)


def _add(duration: Duration, ns: int) -> None:
    duration.count += 1
    duration.ns += ns


def _stages(times: ExecutionTimes) -> tuple[int, int, int]:
    return (
        times.input_end_ns - times.compute_start_ns,
        times.output_start_ns - times.input_end_ns,
        times.compute_end_ns - times.output_start_ns,
    )


def _add_times(statistics: ModelStatistics, request: Request, times: ExecutionTimes, sign: int) -> int:
    """Add, or with -1 subtract, the stages of a request. Returns how long it was queued, in nanoseconds."""
    waited_ns = max(times.compute_start_ns - request.queue_start_ns, 0)
    input_ns, infer_ns, output_ns = _stages(times)
    statistics.queue_ns += sign * waited_ns
    statistics.input_ns += sign * input_ns
    statistics.infer_ns += sign * infer_ns
    statistics.output_ns += sign * output_ns
    return waited_ns


def _count_success(statistics: ModelStatistics, request: Request, times: ExecutionTimes, now_ns: int) -> None:
    duration_ns = now_ns - request.received_ns
    statistics.inference_count += request.batch_size
    _add(statistics.success, duration_ns)
    waited_ns = _add_times(statistics, request, times, 1)
    if not statistics.decoupled:
        statistics.observe_duration(duration_ns)
    if statistics.summaries is not None:
        summarize(statistics.summaries, duration_ns, waited_ns, times, now_ns)


def _count_failure(statistics: ModelStatistics, request: Request, now_ns: int) -> None:
    """Count a request that the backend has reported as failed, although its response is not an error."""
    request.failed = True
    _add(statistics.fail, now_ns - request.received_ns)
    statistics.failures["BACKEND"] += 1


def _count_execution(statistics: ModelStatistics, rows: int, times: ExecutionTimes) -> None:
    input_ns, infer_ns, output_ns = _stages(times)
    statistics.execution_count += 1
    size = statistics.batches[rows]
    size.count += 1
    size.input_ns += input_ns
    size.infer_ns += infer_ns
    size.output_ns += output_ns
