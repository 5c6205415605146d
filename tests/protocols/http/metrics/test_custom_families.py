"""Families of models on the page, judged by Prometheus' own parser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kernel.observe.custom_metrics import CustomMetrics
from kernel.observe.metric_rules import MetricKind, checked_labels
from kernel.texts import has_control, printable
from protocols.http.metrics.custom_families import render_custom

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


def rendered(help_text: str, kind: MetricKind, *all_labels: Mapping[str, str]) -> list[str]:
    metrics = CustomMetrics()
    family = metrics.define("x", help_text, kind)
    for value, labels in enumerate(all_labels, 1):
        series = metrics.hold(family, checked_labels(labels, kind), [0.5, 2.0])
        if kind is HISTOGRAM:
            series.observe([0.5, 2.0], [1, 0, value], 1.5)
        else:
            series.value = value
    return render_custom(metrics.families.values())


def test_a_family_has_its_head_once_and_its_series_below() -> None:
    assert rendered("some help", COUNTER, {"b": "2", "a": "1"}, {}) == [
        "# HELP x some help",
        "# TYPE x counter",
        'x{a="1",b="2"} 1',
        "x 2",
    ]


def test_a_family_without_help_has_a_kind() -> None:
    assert rendered("", GAUGE, {}) == ["# TYPE x gauge", "x 1"]


def test_histograms_are_cumulative() -> None:
    assert rendered("h", HISTOGRAM, {}, {"a": "1"}) == [
        "# HELP x h",
        "# TYPE x histogram",
        "x_count 2",
        "x_sum 1.5",
        'x_bucket{le="0.5"} 1',
        'x_bucket{le="2"} 1',
        'x_bucket{le="+Inf"} 2',
        'x_count{a="1"} 3',
        'x_sum{a="1"} 1.5',
        'x_bucket{a="1",le="0.5"} 1',
        'x_bucket{a="1",le="2"} 1',
        'x_bucket{a="1",le="+Inf"} 3',
    ]


@given(st.text(max_size=20), st.text(max_size=20))
def test_whatever_help_and_labels_say_they_stay_on_their_lines(help_text: str, label: str) -> None:
    lines = rendered(help_text.encode(errors="replace").decode(), GAUGE, {"a": label})
    assert not any(map(has_control, lines))
    (family,) = text_string_to_metric_families("\n".join([*lines, ""]))
    (sample,) = family.samples
    assert (sample.name, sample.value) == ("x", 1)
    assert sample.labels == {"a": printable(label, keep="\n").encode(errors="replace").decode()}
