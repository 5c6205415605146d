"""Statistics that backends report themselves, in place of what workers measure around an execution. Pure.

A request or an execution that the backend has reported counts with the reported times; any other with the measured
ones. So a backend that reports nothing has the same counts as one that reports everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.observe.composed_times import add_to_ensembles
from kernel.observe.reporting.batch_reports import ReportedExecution
from kernel.observe.statistics import BatchStatistics, Duration, ResponseStatistics, summarize

if TYPE_CHECKING:
    from kernel.observe.reporting.batch_reports import BatchReports, ReportedRequest
    from kernel.observe.reporting.execution_times import ExecutionTimes
    from kernel.observe.statistics import ModelStatistics
    from kernel.serving.batch import Batch
    from kernel.serving.request import Request

_NS_PER_MS = 1_000_000

#: What a backend may report a response as. The names are those of the statistics.
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
    """Count a response, by its index among those of its request. `outcome` is one of `OUTCOMES`.

    As in Triton, an empty or cancelled response has no output stage, nor has a failed one that took no time for it.
    """
    found = statistics.responses.get(str(index))
    if found is None:
        found = ResponseStatistics(Duration(), Duration(), Duration(), Duration(), Duration(), Duration())
        statistics.responses[str(index)] = found
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
        statistics.durations.observe(duration_ns)
        if statistics.first_responses is not None:
            statistics.first_responses.observe(duration_ns // _NS_PER_MS)
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
    size = statistics.batches.get(rows)
    if size is None:
        size = statistics.batches[rows] = BatchStatistics()
    size.count += 1
    size.input_ns += input_ns
    size.infer_ns += infer_ns
    size.output_ns += output_ns
