"""What is counted for executions and failures."""

from __future__ import annotations

from kernel.batch import Batch
from kernel.errors import Cancelled, InternalError, QueueFull, QueueTimeout, ServingError
from kernel.observe.statistics import ExecutionTimes, ModelStatistics
from kernel.request import Request
from kernel.testing import FakeInstance, RecordingSink

TIMES = ExecutionTimes(input_ns=1, infer_ns=10, output_ns=100)


def request(rows: int = 1) -> Request:
    made = Request("m", [], RecordingSink())
    made.batch_size = rows
    made.received_ns, made.queue_start_ns = 1000, 1100
    return made


def test_an_execution_counts_rows_requests_and_durations() -> None:
    statistics = ModelStatistics()
    statistics.record_execution(Batch([request(2), request(3)], dispatched_ns=1500), TIMES, now_ns=2000, now_ms=7)
    assert (statistics.inference_count, statistics.execution_count, statistics.last_inference_ms) == (5, 1, 7)
    assert (statistics.success.count, statistics.success.ns) == (2, 2000)
    assert (statistics.queue.count, statistics.queue.ns) == (2, 2 * (2000 - 1100 - 111))
    assert (statistics.compute_infer.count, statistics.compute_infer.ns) == (2, 20)
    assert statistics.batches[5].compute_output.ns == 100


def test_a_failed_request_of_a_batch_counts_as_failure_only() -> None:
    statistics = ModelStatistics()
    good, bad = request(), request()
    bad.failed = True
    statistics.record_execution(Batch([good, bad], dispatched_ns=1500), TIMES, now_ns=2000, now_ms=7)
    assert (statistics.success.count, statistics.inference_count) == (1, 1)
    assert statistics.batches[2].compute_infer.count == 1


def test_failures_have_tritons_reasons() -> None:
    statistics = ModelStatistics()

    def fail(error: ServingError, *, dispatched: bool = False) -> None:
        failed = request()
        failed.instance = FakeInstance("m_0") if dispatched else None
        statistics.record_failure(failed, error, now_ns=1500)

    fail(QueueTimeout())
    fail(Cancelled())
    fail(InternalError("no"), dispatched=True)
    fail(InternalError("no"))
    fail(QueueFull(""))  # never accepted
    assert statistics.failures == {"REJECTED": 1, "CANCELED": 1, "BACKEND": 1, "OTHER": 1}
    assert (statistics.fail.count, statistics.fail.ns) == (4, 2000)
