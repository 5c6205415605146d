"""The counters of executions, responses and failures."""

from __future__ import annotations

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import InternalError, QueueFull, QueueTimeout, RequestCancelled, ServingError
from kernel.observe.metrics_config import FIRST_RESPONSE, REQUEST_DURATION, MetricsConfig
from kernel.observe.statistics import ModelStatistics
from kernel.serving.batch import Batch
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from tests.kernel.observe.times import times_until

TIMES = times_until(2000, input_ns=1, infer_ns=10, output_ns=100)
MS = 1_000_000


def request(rows: int = 1) -> Request:
    made = Request("m", [], RecordingSink())
    made.batch_size = rows
    made.received_ns, made.queue_start_ns = 1000, 1100
    return made


def test_an_execution_counts_rows_requests_and_durations() -> None:
    statistics = ModelStatistics()
    statistics.record_execution(Batch([request(2), request(3)]), TIMES, now_ns=2000, wall_ns=7_000_000)
    assert (statistics.inference_count, statistics.execution_count, statistics.last_inference_ns) == (5, 1, 7_000_000)
    assert (statistics.success.count, statistics.success.ns) == (2, 2000)
    assert statistics.queue_ns == 2 * (2000 - 1100 - 111)
    assert (statistics.input_ns, statistics.infer_ns, statistics.output_ns) == (2, 20, 200)
    size = statistics.batches[5]
    assert (size.count, size.input_ns, size.infer_ns, size.output_ns) == (1, 1, 10, 100)


def test_a_failed_request_of_a_batch_counts_as_failure_only() -> None:
    statistics = ModelStatistics()
    good, bad = request(), request()
    bad.failed = True
    statistics.record_execution(Batch([good, bad]), TIMES, now_ns=2000, wall_ns=7_000_000)
    assert (statistics.success.count, statistics.inference_count) == (1, 1)
    assert statistics.batches[2].count == 1
    assert sum(statistics.durations.counts) == 1


def test_an_execution_whose_requests_all_failed_still_counts() -> None:
    statistics = ModelStatistics()
    bad = request()
    bad.failed = True
    statistics.record_execution(Batch([bad]), TIMES, now_ns=2000, wall_ns=7_000_000)
    assert (statistics.execution_count, statistics.inference_count, statistics.success.count) == (1, 0, 0)


def test_a_worker_that_started_before_the_request_was_queued_leaves_no_negative_wait() -> None:
    statistics = ModelStatistics()
    times = times_until(1200, infer_ns=5000)
    statistics.record_execution(Batch([request()]), times, now_ns=1200, wall_ns=7_000_000)
    assert statistics.queue_ns == 0


def test_failures_have_tritons_reasons_and_refused_requests_are_no_failures() -> None:
    statistics = ModelStatistics()

    def fail(error: ServingError, *, dispatched: bool = False) -> None:
        failed = request()
        failed.dispatched = dispatched
        statistics.record_failure(failed, error, now_ns=1500)

    fail(QueueTimeout())
    fail(RequestCancelled())
    fail(InternalError("no"), dispatched=True)
    fail(InternalError("no"))
    fail(QueueFull(""))  # not a failure: the request was never accepted
    assert statistics.failures == {"REJECTED": 1, "CANCELED": 1, "BACKEND": 1, "OTHER": 1}
    assert (statistics.fail.count, statistics.fail.ns) == (4, 2000)
    assert statistics.refused == 1


# ---- distributions --------------------------------------------------------------------------


def test_durations_are_always_observed_and_other_latencies_only_if_enabled() -> None:
    statistics = ModelStatistics()
    assert statistics.first_responses is None
    assert statistics.summaries is None
    statistics.record_execution(Batch([request()]), TIMES, now_ns=1000 + 3 * MS, wall_ns=7_000_000)
    assert statistics.durations.sum == 3 * MS
    assert statistics.durations.cumulative()[statistics.durations.bounds.index(0.005)] == 1
    assert statistics.durations.cumulative()[statistics.durations.bounds.index(0.0025)] == 0


def test_the_first_response_of_a_model_that_is_not_decoupled_is_at_the_end_of_its_execution() -> None:
    statistics = ModelStatistics()
    statistics.configure(MetricsConfig(histogram_latencies=True), ModelConfig())
    assert statistics.first_responses is not None
    statistics.record_execution(Batch([request(), request()]), TIMES, now_ns=1000 + 300 * MS, wall_ns=7_000_000)
    assert statistics.first_responses.bounds == (100, 500, 2000, 5000)
    assert (statistics.first_responses.cumulative(), statistics.first_responses.sum) == ([0, 2, 2, 2, 2], 600)


def test_summaries_are_in_microseconds() -> None:
    statistics = ModelStatistics()
    statistics.configure(MetricsConfig(summary_latencies=True), ModelConfig())
    assert statistics.summaries is not None
    times = times_until(101_000, input_ns=2000, infer_ns=30_000, output_ns=4000)
    statistics.record_execution(Batch([request()]), times, now_ns=101_000, wall_ns=7_000_000)
    summaries = statistics.summaries
    parts = (
        summaries.request, summaries.queue, summaries.compute_input, summaries.compute_infer, summaries.compute_output,
    )  # fmt: skip
    assert [part.sum for part in parts] == [100, (101_000 - 1100 - 36_000) // 1000, 2, 30, 4]
    assert [part.values((0.5,), 101_000) for part in parts] == [[100], [63], [2], [30], [4]]


@pytest.mark.parametrize("failed", [False, True])
def test_each_response_of_a_decoupled_model_is_observed(failed: bool) -> None:
    statistics = ModelStatistics(decoupled=True)
    statistics.configure(MetricsConfig(histogram_latencies=True), ModelConfig())
    streamed = request()
    streamed.failed = failed
    statistics.record_execution(Batch([request()]), TIMES, now_ns=2000, wall_ns=7_000_000)
    for count, response, now_ns in (
        (1, Response("m", "1", "", outputs=[], final=False), 1000 + 50 * MS),
        (2, Response("m", "1", "", outputs=[], final=False), 1000 + 900 * MS),
        (2, Response("m", "1", ""), 1000 + 990 * MS),
    ):
        streamed.response_count = count
        statistics.record_response(streamed, response, now_ns)
    assert statistics.first_responses is not None
    assert (statistics.first_responses.cumulative()[-1], statistics.first_responses.sum) == (1, 50)
    assert (statistics.durations.cumulative()[-1], statistics.durations.sum) == ((0, 0) if failed else (1, 990 * MS))


def test_errors_and_empty_responses_are_not_first_responses() -> None:
    statistics = ModelStatistics(decoupled=True)
    statistics.configure(MetricsConfig(histogram_latencies=True), ModelConfig())
    wrong, nothing = request(), request()
    wrong.response_count, wrong.failed = 1, True
    statistics.record_response(wrong, Response("m", "1", "", error=InternalError("no")), 2000)
    statistics.record_response(nothing, Response("m", "1", ""), 2000)
    assert statistics.first_responses is not None
    assert sum(statistics.first_responses.counts) == 0
    assert sum(statistics.durations.counts) == 1


def test_a_model_may_configure_its_buckets() -> None:
    config = ModelConfig()
    for family in (FIRST_RESPONSE, REQUEST_DURATION, "other"):
        control = config.model_metrics.metric_control.add()
        control.metric_identifier.family = family
        control.histogram_options.buckets.extend([2, 1])
    statistics = ModelStatistics()
    (complaint,) = statistics.configure(MetricsConfig(histogram_latencies=True), config)
    assert complaint.startswith("Metric family 'other'")
    assert statistics.first_responses is not None
    assert statistics.first_responses.bounds == statistics.durations.bounds == (1, 2)
