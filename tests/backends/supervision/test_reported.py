"""What workers report arrives in their model's metrics, and nothing that they could not have reported.

Reports of a backend, from the worker's messages to the statistics.

What the traces of requests get to know of an execution.
"""

from __future__ import annotations

import logging

import pytest

from backends.supervision.reported import ReportedMetrics, ReportedStatistics, trace_execution
from backends.transport import wire
from backends.worker.custom_metrics import MetricRegistry
from kernel.observe.custom_metrics import CustomMetrics, CustomSeries
from kernel.observe.execution_reports import ExecutionTimes, MemoryUsage
from kernel.observe.metric_rules import MAX_SERIES, MetricKind
from kernel.observe.statistics import ModelStatistics
from kernel.serving.batch import Batch
from kernel.serving.request import Request
from kernel.testing import RecordingSink

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


class Worker:
    """A worker's registry and the kernel's end of it, with every message encoded in between."""

    def __init__(self, metrics: CustomMetrics) -> None:
        self.registry = MetricRegistry(lambda: None, lambda: None)
        self.reported = ReportedMetrics("m_0", metrics)

    def report(self, now_ns: int = 0) -> None:
        for message in self.registry.take():
            decoded = wire.to_kernel_decoder.decode(wire.encoder.encode(message))
            assert isinstance(decoded, wire.MetricsChanged)
            self.reported.take(decoded, now_ns)


def series_of(metrics: CustomMetrics) -> CustomSeries:
    """Return the only series that there is."""
    metrics.check()
    (family,) = metrics.families.values()
    (series,) = family.series.values()
    return series


def test_counters_of_all_workers_add_up() -> None:
    metrics = CustomMetrics()
    for amount in (1.5, 2.0):
        worker = Worker(metrics)
        series, _ = worker.registry.hold(worker.registry.define("x", "", COUNTER), {"a": "1"})
        worker.report()
        series.increment(amount)
        worker.report()
        series.increment(amount)
        worker.report()
    assert series_of(metrics).value == 7.0


def test_a_gauge_has_the_value_that_was_set_last_and_what_was_added_to_it_since() -> None:
    metrics = CustomMetrics()
    workers = [Worker(metrics), Worker(metrics)]
    first, second = (each.registry.hold(each.registry.define("x", "", GAUGE), {})[0] for each in workers)
    for now_ns, (worker, value) in enumerate(zip(workers, (5.0, 8.0), strict=True)):
        (first, second)[now_ns].set(value)
        worker.report(now_ns)
    assert series_of(metrics).value == 8.0
    first.increment(1.0)
    second.increment(-2.0)
    for worker in workers:
        worker.report(7)
    assert series_of(metrics).value == 7.0
    assert series_of(metrics).changed_ns == 7


def test_histograms_of_all_workers_add_up_also_where_their_bounds_differ() -> None:
    metrics = CustomMetrics()
    for bounds in ([1.0, 2.0], [1.5, 2.0]):
        worker = Worker(metrics)
        series, _ = worker.registry.hold(worker.registry.define("x", "", HISTOGRAM), {}, bounds)
        for value in (0.5, 1.7, 3.0):
            series.observe(value)
        worker.report()
    histogram = series_of(metrics).histogram
    assert histogram is not None
    assert (histogram.bounds, histogram.counts, histogram.sum) == ((1.0, 2.0), [1, 3, 2], 10.4)


def test_what_the_model_drops_goes() -> None:
    metrics = CustomMetrics()
    worker = Worker(metrics)
    family = worker.registry.define("x", "", COUNTER)
    _, held = worker.registry.hold(family, {})
    worker.report()
    worker.registry.release("x", held)
    worker.report()
    assert not metrics.families["x", COUNTER].series
    worker.registry.hold(family, {})
    worker.report()
    assert series_of(metrics).value == 0


def test_a_worker_that_takes_the_place_of_one_that_died_goes_on_counting() -> None:
    metrics = CustomMetrics()
    for _ in range(2):
        worker = Worker(metrics)
        counter, _ = worker.registry.hold(worker.registry.define("c", "", COUNTER), {})
        gauge, _ = worker.registry.hold(worker.registry.define("g", "", GAUGE), {})
        counter.increment(1.0)
        gauge.increment(1.0)
        worker.report()
        worker.reported.end()
    assert metrics.families["c", COUNTER].series[()].value == 2
    assert not metrics.families["g", GAUGE].series
    metrics.check()


def test_what_there_is_no_room_for_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = CustomMetrics()
    full = metrics.define("full", "", COUNTER)
    for index in range(MAX_SERIES):
        metrics.hold(full, (("n", str(index)),), ())
    worker = Worker(metrics)
    family = worker.registry.define("x", "", COUNTER)
    held = []
    with caplog.at_level(logging.ERROR):
        for value in "ab":
            series, labels = worker.registry.hold(family, {"a": value})
            held.append(labels)
            series.increment(1.0)
        worker.report()
    assert caplog.messages == ["model instance 'm_0' has more metrics than a model may have; some are left out"]
    worker.registry.release("x", held[0])
    worker.report()
    worker.reported.end()
    metrics.check()


FAMILY = wire.MetricFamilyRef("x", "", "counter")

SERIES = wire.MetricSeriesRef(1, "x")

BUCKETS = [wire.MetricFamilyRef("h", "", "histogram")], [wire.MetricSeriesRef(1, "h", {}, [1.0])]


@pytest.mark.parametrize(
    "message",
    [
        wire.MetricsChanged([wire.MetricFamilyRef("x 1\ny", "", "counter")]),
        wire.MetricsChanged([wire.MetricFamilyRef("nv_inference_count", "", "counter")]),
        wire.MetricsChanged([wire.MetricFamilyRef("x", "", "summary")]),
        wire.MetricsChanged([], [SERIES]),
        wire.MetricsChanged([FAMILY], [SERIES, SERIES]),
        wire.MetricsChanged([FAMILY], [wire.MetricSeriesRef(1, "x", {'a="1",b': "2"})]),
        wire.MetricsChanged(changes=[wire.MetricChange(1, 1.0)]),
        wire.MetricsChanged([FAMILY], [SERIES], [wire.MetricChange(1, -1.0)]),
        wire.MetricsChanged([FAMILY], [SERIES], [wire.MetricChange(1, 1.0, True)]),
        wire.MetricsChanged(*BUCKETS, [wire.MetricChange(1, 1.0)]),
        wire.MetricsChanged(*BUCKETS, [wire.MetricChange(1, 1.0, False, [1, -1])]),
        wire.MetricsChanged(removed=[1]),
    ],
)
def test_what_no_worker_of_ours_sends_is_refused(message: wire.MetricsChanged) -> None:
    with pytest.raises(ValueError, match="."):
        ReportedMetrics("m_0", CustomMetrics()).take(message, 0)


TIMES = wire.StageTimes(10, 20, 30, 40)


class Lab:
    """A batch of two requests, numbers 5 and 6, that a worker executes."""

    def __init__(self) -> None:
        self.statistics = ModelStatistics()
        self.reports = ReportedStatistics("m_0", self.statistics)
        self.first, self.second = (Request("m", [], RecordingSink()) for _ in range(2))
        self.batch = Batch([self.first, self.second], number=3, first_request_number=5)
        self.live = {5: self.first, 6: self.second}

    def take(self, *, offset_ns: int = 0, ended: bool = False, **parts: object) -> None:
        message = wire.Reported(3, **parts)  # type: ignore[arg-type]
        self.reports.take(message, self.live, {} if ended else {3: self.batch}, offset_ns)


def test_reports_wait_for_the_end_of_their_batch() -> None:
    lab = Lab()
    lab.take(requests=[wire.RequestReport(6, TIMES, False)], batches=[wire.BatchReport(2, TIMES)], offset_ns=100)
    assert lab.reports.pending
    found = lab.reports.of_batch(lab.batch)
    assert found is not None
    assert list(found.requests) == [lab.second]
    assert found.requests[lab.second].times == ExecutionTimes(110, 120, 130, 140)
    assert not found.requests[lab.second].success
    assert [each.rows for each in found.executions] == [2]
    assert not lab.reports.pending
    assert lab.reports.of_batch(lab.batch) is None


def test_a_late_report_corrects_what_was_counted() -> None:
    lab = Lab()
    measured = ExecutionTimes(1, 1, 2, 2)
    lab.statistics.record_execution(lab.batch, measured, 50, 0)
    del lab.live[5]
    lab.reports.counted(lab.batch, measured, 50, lab.live)
    lab.take(requests=[wire.RequestReport(6, TIMES)], ended=True)
    assert (lab.statistics.success.count, lab.statistics.infer_ns) == (2, 1 + 10)
    assert not lab.reports.open
    assert not lab.reports.pending


def test_a_report_about_a_request_that_nobody_waits_for_is_dropped() -> None:
    lab = Lab()
    lab.take(requests=[wire.RequestReport(99, TIMES)], ended=True)
    assert not lab.reports.pending


def test_reports_that_no_worker_of_ours_sends_are_refused() -> None:
    lab = Lab()
    with pytest.raises(ValueError, match="not in order"):
        lab.take(requests=[wire.RequestReport(5, wire.StageTimes(4, 3, 2, 1))])
    with pytest.raises(ValueError, match="the outcome 'lost'"):
        lab.take(responses=[wire.ResponseReport(0, "lost", 1, 2, 3)])
    with pytest.raises(ValueError, match="257 kinds"):
        lab.reports.take_memory(wire.MemoryUsed([wire.MemoryUse("CPU", 0, 1)] * 257))


def test_the_memory_of_a_worker_ends_with_it() -> None:
    lab = Lab()
    lab.reports.take_memory(wire.MemoryUsed([wire.MemoryUse("GPU", 2, 64)]))
    assert lab.statistics.memory.total() == [MemoryUsage("GPU", 2, 64)]
    lab.reports.end()
    assert lab.statistics.memory.total() == []


class ExplainedTrace:
    """The part of a trace that hears of an execution."""

    usual = False
    explains = True
    execution: object = None

    def executed(self, times: ExecutionTimes) -> None:
        self.times = times


def test_the_rows_of_a_batch_are_counted_once_for_all_its_explanations() -> None:
    requests = [Request("m", [], RecordingSink(), batch_size=rows, trace=ExplainedTrace()) for rows in (1, 3)]  # type: ignore[arg-type]
    batch = Batch([requests[0], None, requests[1]], slots=[0, 1, 2], rescheduled_rows=2)
    trace_execution(batch, ExecutionTimes(1, 2, 3, 4), "m_0", wire.Executed(1, copies=5, copied_byte_size=6))
    first, second = (request.trace.execution for request in requests if request.trace is not None)
    assert first is second
    assert first is not None
    assert (first.rows, first.request_count, first.copies, first.copied_byte_size) == (6, 2, 5, 6)
