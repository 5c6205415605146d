from __future__ import annotations

import pytest

from kernel.observe.custom_metrics import CustomFamily, CustomMetrics, TooManySeries, merged_families
from kernel.observe.metric_rules import MAX_SERIES, Labels, MetricKind

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
A: Labels = (("a", "1"),)


def values(families: list[CustomFamily]) -> dict[str, dict[Labels, float]]:
    return {family.name: {labels: one.value for labels, one in family.series.items()} for family in families}


def metrics_with(name: str, kind: MetricKind, value: float, *, changed_ns: int = 0) -> CustomMetrics:
    metrics = CustomMetrics()
    series = metrics.hold(metrics.define(name, f"help of {value}", kind), A, ())
    series.value, series.changed_ns = value, changed_ns
    return metrics


def test_workers_of_a_model_share_families_and_series() -> None:
    metrics = CustomMetrics()
    first = metrics.define("requests", "first", COUNTER)
    assert metrics.define("requests", "second", COUNTER) is first
    assert first.help == "first"
    assert metrics.hold(first, A, ()) is metrics.hold(first, A, ())
    assert metrics.hold(first, (), ()) is not metrics.hold(first, A, ())
    metrics.check()


def test_a_series_is_removed_with_its_last_model_object() -> None:
    metrics = CustomMetrics()
    family = metrics.define("requests", "", COUNTER)
    for _ in range(2):
        metrics.hold(family, A, ())
    metrics.release(family, A)
    assert list(family.series) == [A]
    metrics.release(family, A)
    assert not family.series
    assert merged_families([("m", metrics)]) == ([], []), "a family without series is shown"
    metrics.check()


@pytest.mark.parametrize(("kind", "stays"), [(COUNTER, True), (HISTOGRAM, True), (GAUGE, False)])
def test_counters_of_ended_workers_stay_and_their_gauges_are_removed(kind: MetricKind, stays: bool) -> None:
    metrics = CustomMetrics()
    family = metrics.define("x", "", kind)
    series = metrics.hold(family, A, [1.0])
    metrics.hold(family, A, [1.0])
    metrics.worker_ended(family, A)
    assert A in family.series
    metrics.worker_ended(family, A)
    assert (A in family.series) == stays
    assert (metrics.hold(family, A, [1.0]) is series) == stays
    metrics.check()


def test_the_number_of_series_is_limited() -> None:
    metrics = CustomMetrics()
    family = metrics.define("x", "", COUNTER)
    for index in range(MAX_SERIES):
        metrics.hold(family, (("n", str(index)),), ())
    with pytest.raises(TooManySeries):
        metrics.hold(family, A, ())
    metrics.release(family, (("n", "7"),))
    metrics.hold(family, A, ())
    metrics.check()


def test_counters_of_several_models_add_up() -> None:
    models = [("a", metrics_with("x", COUNTER, 2)), ("b", metrics_with("x", COUNTER, 3)), ("c", CustomMetrics())]
    families, left_out = merged_families(models)
    assert values(families) == {"x": {A: 5}}
    assert families[0].help == "help of 2"
    assert not left_out
    assert values(merged_families(models)[0]) == {"x": {A: 5}}, "merging has changed the series of a model"


def test_a_gauge_of_several_models_has_the_value_that_changed_last() -> None:
    old, new = metrics_with("x", GAUGE, 2, changed_ns=1), metrics_with("x", GAUGE, 3, changed_ns=2)
    assert values(merged_families([("a", old), ("b", new)])[0]) == {"x": {A: 3}}
    assert values(merged_families([("a", new), ("b", old)])[0]) == {"x": {A: 3}}


def test_histograms_of_several_models_add_up_in_the_buckets_of_the_first() -> None:
    models = []
    for name, bounds in (("a", [1.0, 2.0]), ("b", [1.5])):
        metrics = CustomMetrics()
        series = metrics.hold(metrics.define("x", "", HISTOGRAM), (), bounds)
        series.observe(bounds, [1] * (len(bounds) + 1), 10.0)
        models.append((name, metrics))
    ((family,), _) = merged_families(models)
    histogram = family.series[()].histogram
    assert histogram is not None
    assert (histogram.bounds, histogram.counts, histogram.sum) == ((1.0, 2.0), [1, 2, 2], 20.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("x", COUNTER), ("x", GAUGE)), (("x", HISTOGRAM), ("x_count", COUNTER)), (("x_sum", GAUGE), ("x", HISTOGRAM))],
)
def test_of_two_colliding_families_only_the_first_is_shown(
    first: tuple[str, MetricKind], second: tuple[str, MetricKind]
) -> None:
    models = []
    for model, (name, kind) in (("a", first), ("b", second)):
        metrics = CustomMetrics()
        metrics.hold(metrics.define(name, "", kind), (), ())
        models.append((model, metrics))
    families, (line,) = merged_families(models)
    assert [(family.name, family.kind) for family in families] == [first]
    assert line.startswith(f"metric family '{second[0]}' of model 'b' is left out: '{first[0]}' of model 'a' has ")
