"""Statistics with what backends report."""

from __future__ import annotations

import msgspec
import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.observe.execution_reports import (
    ExecutionTimes,
    InstanceMemory,
    MemoryUsage,
    ReportedExecution,
    ReportedRequest,
)
from kernel.observe.metrics_config import MetricsConfig
from kernel.observe.statistics import (
    CountedRequest,
    ModelStatistics,
    correct_request,
    record_reported,
    record_reported_response,
)
from kernel.serving.batch import Batch, BatchReports
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from tests.kernel.observe.times import times_until

MEASURED = times_until(2000, input_ns=1, infer_ns=10, output_ns=100)
REPORTED = ExecutionTimes(1200, 1230, 1270, 1300)


def request(rows: int = 1) -> Request:
    made = Request("m", [], RecordingSink())
    made.batch_size = rows
    made.received_ns, made.queue_start_ns = 1000, 1100
    return made


def counted(statistics: ModelStatistics) -> dict[str, object]:
    """Return all counters, to compare them."""
    plain = {name: value for name, value in vars(statistics).items() if isinstance(value, (int, dict, msgspec.Struct))}
    histograms = [each.cumulative() for each in (statistics.durations, statistics.first_responses) if each is not None]
    return {**plain, "histograms": histograms}


def enabled() -> ModelStatistics:
    statistics = ModelStatistics()
    statistics.configure(MetricsConfig(histogram_latencies=True, summary_latencies=True), ModelConfig())
    return statistics


def test_a_batch_of_which_nothing_was_reported_counts_as_one_without_reports() -> None:
    measured, reported = enabled(), enabled()
    measured.record_execution(Batch([request(2), request(3)]), MEASURED, 2000, 7)
    record_reported(reported, Batch([request(2), request(3)]), BatchReports(), MEASURED, 2000, 7)
    assert counted(measured) == counted(reported)
    assert reported.summaries is not None
    assert reported.summaries.request.count == 2


def test_a_reported_request_has_its_own_queue_and_compute_times() -> None:
    statistics, own, other = ModelStatistics(), request(), request()
    reports = BatchReports({own: ReportedRequest(REPORTED)})
    record_reported(statistics, Batch([own, other]), reports, MEASURED, 2000, 7)
    assert statistics.queue_ns == 100 + (2000 - 111 - 1100)
    assert (statistics.input_ns, statistics.infer_ns, statistics.output_ns) == (31, 50, 130)
    assert (statistics.success.count, statistics.inference_count, statistics.execution_count) == (2, 2, 1)
    assert statistics.batches[2].output_ns == 100  # the execution was not reported


def test_reported_executions_replace_the_measured_one() -> None:
    statistics, whole = ModelStatistics(), request(4)
    reports = BatchReports(executions=[ReportedExecution(3, REPORTED), ReportedExecution(9, REPORTED)])
    record_reported(statistics, Batch([whole]), reports, MEASURED, 2000, 7)
    assert statistics.execution_count == 2
    assert {rows: size.infer_ns for rows, size in statistics.batches.items()} == {3: 40, 4: 40}  # no more than it has
    assert statistics.infer_ns == 10  # the request was not reported


def test_a_request_that_is_reported_as_failed_counts_as_a_failure_of_the_backend() -> None:
    statistics, failed = ModelStatistics(), request()
    reports = BatchReports({failed: ReportedRequest(REPORTED, success=False)})
    record_reported(statistics, Batch([failed]), reports, MEASURED, 2000, 7)
    assert (statistics.success.count, statistics.fail.count, statistics.fail.ns) == (0, 1, 1000)
    assert statistics.failures["BACKEND"] == 1
    assert (statistics.inference_count, statistics.execution_count) == (0, 1)


def test_a_request_with_an_error_counts_once_also_if_it_is_reported_as_a_success() -> None:
    statistics, failed = ModelStatistics(), request()
    failed.failed = True  # `Model.responded` has counted it
    record_reported(statistics, Batch([failed]), BatchReports({failed: ReportedRequest(REPORTED)}), MEASURED, 2000, 7)
    assert (statistics.success.count, statistics.fail.count) == (0, 0)


@pytest.mark.parametrize("success", [True, False])
def test_a_report_after_the_end_of_the_batch_has_the_same_effect(success: bool) -> None:
    early, late = ModelStatistics(decoupled=True), ModelStatistics(decoupled=True)
    reported, asked = ReportedRequest(REPORTED, success=success), request()
    record_reported(early, Batch([asked]), BatchReports({asked: reported}), MEASURED, 2000, 7)
    again = request()
    late.record_execution(Batch([again]), MEASURED, 2000, 7)
    correct_request(late, again, CountedRequest(MEASURED, 2000), reported)
    assert counted(early) == counted(late)


def test_responses_are_counted_by_their_index_and_outcome() -> None:
    statistics = ModelStatistics(decoupled=True)
    for index, outcome in ((0, "success"), (0, "success"), (1, "fail"), (2, "empty_response"), (3, "cancel")):
        record_reported_response(statistics, index, outcome, 10, 14, 20)
    shown = {
        index: {name: (part.count, part.ns) for name, part in msgspec.structs.asdict(each).items() if part.count}
        for index, each in statistics.responses.items()
    }
    assert shown == {
        "0": {"compute_infer": (2, 8), "compute_output": (2, 12), "success": (2, 20)},
        "1": {"compute_infer": (1, 4), "compute_output": (1, 6), "fail": (1, 10)},
        "2": {"compute_infer": (1, 10), "empty_response": (1, 10)},
        "3": {"cancel": (1, 10)},
    }


def test_the_memory_of_a_model_is_the_sum_over_its_instances() -> None:
    memory = InstanceMemory()
    memory.report("m_0_0", [MemoryUsage("GPU", 0, 5), MemoryUsage("CPU", 0, 1)])
    memory.report("m_0_1", [MemoryUsage("GPU", 1, 7), MemoryUsage("CPU", 0, 2)])
    assert memory.total() == [MemoryUsage("CPU", 0, 3), MemoryUsage("GPU", 0, 5), MemoryUsage("GPU", 1, 7)]
    memory.report("m_0_1", [MemoryUsage("CPU", 0, 4)])
    memory.forget("m_0_0")
    memory.forget("m_0_2")
    assert memory.total() == [MemoryUsage("CPU", 0, 4)]


def test_the_process_of_an_instance_is_known_until_its_worker_ends() -> None:
    memory = InstanceMemory()
    memory.worker_started("m_0_0", 17)
    memory.worker_started("m_0_1", 0)  # on another machine
    assert memory.pids == {"m_0_0": 17}
    memory.forget("m_0_0")
    assert memory.pids == {}
