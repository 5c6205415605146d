"""What workers report arrives in their model's metrics, and nothing that they could not have reported."""

from __future__ import annotations

import logging

import pytest

from backends.metric_registry import MetricRegistry
from backends.supervision.reported.reported_metrics import ReportedMetrics
from backends.transport import wire
from kernel.observe.custom_metrics import CustomMetrics, CustomSeries
from kernel.observe.metric_rules import MAX_SERIES, MetricKind

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
