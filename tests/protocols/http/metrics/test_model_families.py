"""The page as a whole is judged by Prometheus' own parser.

Which model versions can execute, as a metric.

Families of models on the page, judged by Prometheus' own parser.
"""

from __future__ import annotations

import gc
import math
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.observe.custom_metrics import CustomMetrics
from kernel.observe.metric_rules import MetricKind, checked_labels
from kernel.observe.metrics_config import MetricsConfig
from kernel.observe.statistics import BatchStatistics, Duration
from kernel.serving.catalog import IndexItem
from kernel.serving.instances import Condition
from kernel.serving.model import Model
from kernel.serving.model_figures import figures_of
from kernel.serving.request import Request
from kernel.testing import FakeClock, FakeInstance, RecordingSink, model_spec
from kernel.texts import has_control, printable
from protocols.http.metrics.model_families import render_custom, render_models, render_readiness
from schedulers.direct import direct

if TYPE_CHECKING:
    from collections.abc import Mapping

    from prometheus_client.metrics_core import Metric

ALL = MetricsConfig(counter_latencies=True, histogram_latencies=True, summary_latencies=True)

HOSTILE = 'm"\\\n} 1\nnv_forged{model="x'


def model(
    name: str = "m", *, config: MetricsConfig = ALL, tags: dict[str, str] | None = None, max_batch_size: int = 8
) -> Model:
    spec = msgspec.structs.replace(model_spec(name, max_batch_size=max_batch_size), metric_tags=tags or {})
    made = Model(spec, ModelConfig(), 1, direct, FakeClock())
    made.statistics.configure(config, ModelConfig())
    return made


def lines(models: list[Model], config: MetricsConfig = ALL) -> list[str]:
    return render_models([figures_of(each) for each in models], config, now_ns=0)


def families(models: list[Model], config: MetricsConfig = ALL) -> dict[str, Metric]:
    parsed = text_string_to_metric_families("\n".join([*lines(models, config), ""]))
    return {family.name: family for family in parsed}


def value_of(models: list[Model], name: str, **labels: str) -> float:
    """Return the value of the one sample with this name and at least these labels."""
    (value,) = [
        sample.value
        for family in families(models).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return value


# ---- the form -------------------------------------------------------------------------------


def test_every_family_has_one_help_and_one_type_and_its_samples_behind_them() -> None:
    text = lines([model("a"), model("b")])
    heads = Counter(line.split(" ", 3)[2] for line in text if line.startswith("#"))
    assert set(heads.values()) == {2}
    family = ""
    for line in text:
        if line.startswith("# HELP "):
            family = line.split(" ")[2]
        elif not line.startswith("#"):
            assert re.match(rf"{family}(_count|_sum|_bucket)?\{{", line), line


def test_no_series_is_there_twice() -> None:
    names = Counter(line.rpartition(" ")[0] for line in lines([model("a"), model("b")]) if not line.startswith("#"))
    assert set(names.values()) == {1}


def test_hostile_names_and_tags_stay_in_their_labels() -> None:
    made = model(HOSTILE, tags={"a b": HOSTILE, "__x": "1", "team": "core"})
    found = families([made])
    assert all(name.startswith(("nv_", "naiad_")) and name != "nv_forged" for name in found)
    labels = {"model": HOSTILE, "_a_b": HOSTILE, "_x": "1", "_team": "core", "version": "1"}
    assert all(labels.items() <= sample.labels.items() for family in found.values() for sample in family.samples)


def test_labels_are_in_tritons_order() -> None:
    (line,) = [line for line in lines([model(tags={"team": "core"})]) if "BACKEND" in line]
    assert line == 'nv_inference_request_failure{_team="core",model="m",reason="BACKEND",version="1"} 0'


def test_a_model_of_a_namespace_has_it_as_a_label() -> None:
    made = model()
    made.spec = msgspec.structs.replace(made.spec, namespace="/models")
    (line,) = [line for line in lines([made]) if "BACKEND" in line]
    assert line == 'nv_inference_request_failure{model="m",namespace="/models",reason="BACKEND",version="1"} 0'


def test_families_are_there_without_any_model() -> None:
    assert set(families([])) == set(families([model()]))
    assert not any(family.samples for family in families([]).values())


def test_histograms_are_cumulative_and_end_with_all() -> None:
    made = model()
    for ms in (1, 3, 100_000):
        made.statistics.durations.observe(ms * 1_000_000)
    samples = families([made])["naiad_inference_request_duration_seconds"].samples
    buckets = [s for s in samples if s.name.endswith("_bucket")]
    bounds = [float(s.labels["le"]) for s in buckets]
    assert bounds == sorted(bounds)
    assert bounds[-1] == math.inf
    assert [s.value for s in buckets] == sorted(s.value for s in buckets)
    by_bound = {s.labels["le"]: s.value for s in buckets}
    assert (by_bound["0.0005"], by_bound["0.001"], by_bound["0.005"], by_bound["60"]) == (0, 1, 2, 2)
    assert {s.name: s.value for s in samples if "le" not in s.labels} == {
        "naiad_inference_request_duration_seconds_count": by_bound["+Inf"],
        "naiad_inference_request_duration_seconds_sum": 100.004,
    }


# ---- the values -----------------------------------------------------------------------------


def test_tritons_counters_have_its_names_texts_and_units() -> None:
    made = model()
    counted = made.statistics
    counted.success = Duration(3, 5_999)
    counted.inference_count, counted.execution_count = 7, 2
    counted.queue_ns, counted.input_ns, counted.infer_ns, counted.output_ns = 1_000, 2_000, 3_000, 4_000
    counted.failures["BACKEND"] = 2
    for _ in range(4):
        made.live.add(Request("m", [], RecordingSink()))
    counted.load_ns = 1_500_000_000
    text = lines([made])
    labels = '{model="m",version="1"}'
    for line in (
        "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes",
        "# TYPE nv_inference_request_success counter",
        f"nv_inference_request_success{labels} 3",
        "# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes",
        'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 2',
        'nv_inference_request_failure{model="m",reason="CANCELED",version="1"} 0',
        'nv_inference_request_failure{model="m",reason="OTHER",version="1"} 0',
        'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 0',
        f"nv_inference_count{labels} 7",
        f"nv_inference_exec_count{labels} 2",
        f"nv_inference_request_duration_us{labels} 5",
        f"nv_inference_queue_duration_us{labels} 1",
        f"nv_inference_compute_input_duration_us{labels} 2",
        f"nv_inference_compute_infer_duration_us{labels} 3",
        f"nv_inference_compute_output_duration_us{labels} 4",
        "# TYPE nv_inference_pending_request_count gauge",
        f"nv_inference_pending_request_count{labels} 4",
        f"nv_model_load_duration_secs{labels} 1.5",
        "# HELP nv_inference_first_response_histogram_ms Duration from request to first response in milliseconds",
        f"nv_inference_first_response_histogram_ms_sum{labels} 0",
        'nv_inference_first_response_histogram_ms_bucket{model="m",version="1",le="5000"} 0',
        'nv_inference_queue_summary_us{model="m",version="1",quantile="0.999"} NaN',
        f"nv_inference_compute_output_summary_us_count{labels} 0",
    ):
        assert line in text, line


def test_metrics_that_triton_lacks_have_their_lines() -> None:
    made = model()
    for _ in range(2):
        made.live.add(Request("m", [], RecordingSink()))
    made.statistics.refused = 3
    made.statistics.workers_lost, made.statistics.workers_restarted = 5, 4
    made.statistics.copied_tensors, made.statistics.copied_byte_size = 2, 70_000
    made.reload_error = "no luck"
    for name, value in (
        ("naiad_inference_queue_depth", 2),
        ("naiad_inference_in_flight_requests", 2),
        ("naiad_inference_requests_refused_total", 3),
        ("naiad_model_instance_count", 0),
        ("naiad_worker_lost_total", 5),
        ("naiad_worker_restarts_total", 4),
        ("naiad_copied_tensors_total", 2),
        ("naiad_copied_bytes_total", 70_000),
        ("naiad_arena_used_bytes", 0),
        ("naiad_model_reload_failed", 1),
    ):
        assert value_of([made], name) == value, name


@pytest.mark.parametrize(("max_batch_size", "bounds"), [(0, "1"), (1, "1"), (5, "1 2 4 8"), (8, "1 2 4 8")])
def test_batch_sizes_have_bounds_up_to_the_largest(max_batch_size: int, bounds: str) -> None:
    samples = families([model(max_batch_size=max_batch_size)])["naiad_inference_batch_size"].samples
    assert [s.labels["le"] for s in samples if "le" in s.labels] == [*bounds.split(), "+Inf"]


def test_batch_sizes_are_counted_by_execution() -> None:
    made = model(max_batch_size=8)
    made.statistics.batches.update({1: BatchStatistics(4), 3: BatchStatistics(2), 8: BatchStatistics(1)})
    values = [value_of([made], "naiad_inference_batch_size_bucket", le=le) for le in ("1", "2", "4", "8", "+Inf")]
    assert values == [4, 4, 6, 7, 7]
    assert value_of([made], "naiad_inference_batch_size_sum") == 18


def test_summaries_tell_the_quantiles_that_were_asked_for() -> None:
    config = MetricsConfig(summary_latencies=True, quantiles=(0.5, 1.0))
    made = model(config=config)
    assert made.statistics.summaries is not None
    for value in (10, 20, 30):
        made.statistics.summaries.request.observe(value, now_ns=0)
    samples = families([made], config)["nv_inference_request_summary_us"].samples
    assert [(s.name, s.labels.get("quantile"), s.value) for s in samples] == [
        ("nv_inference_request_summary_us_count", None, 3),
        ("nv_inference_request_summary_us_sum", None, 60),
        ("nv_inference_request_summary_us", "0.5", 20),
        ("nv_inference_request_summary_us", "1", 30),
    ]


def test_what_is_switched_off_is_not_on_the_page() -> None:
    everything = set(families([model()]))
    bare = MetricsConfig(counter_latencies=False)
    left = set(families([model(config=bare)], bare))
    assert {name for name in everything - left if not name.startswith("nv_inference_")} == set()
    assert len(everything - left) == 5 + 1 + 5
    assert {"nv_inference_request_success", "nv_inference_count", "naiad_inference_request_duration_seconds"} <= left


# ---- the cost -------------------------------------------------------------------------------


def calls_of_a_scrape(models: list[Model]) -> int:
    """Return how many functions, ours and built-in ones, are called to render the page."""
    count = 0

    def note(frame: object, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # what it frees of earlier tests may call functions
    sys.setprofile(note)
    try:
        lines(models)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def test_the_work_of_a_scrape_grows_with_the_number_of_models_and_not_faster() -> None:
    models = [model(f"m{number}") for number in range(90)]
    lines(models)  # fills what is cached
    thirty, sixty, ninety = (calls_of_a_scrape(models[:count]) for count in (30, 60, 90))
    assert ninety - sixty == sixty - thirty
    assert (sixty - thirty) / 30 < 400


# ---- beside Triton --------------------------------------------------------------------------

#: The page of Triton 2.51 with one model, after some requests.
RECORDED = Path(__file__).parent / "recorded" / "metrics.txt"


def form(text: str) -> dict[str, tuple[str, str, set[tuple[str, ...]]]]:
    """Return help, type and the label names of samples of each family about models, as written."""
    found: dict[str, tuple[str, str, set[tuple[str, ...]]]] = {}
    help_text = name = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, help_text = line.split(" ", 3)
        elif line.startswith("# TYPE "):
            found[name] = (help_text, line.rpartition(" ")[2], set())
        else:
            found[name][2].add(tuple(re.findall(r'(\w+)="', line)))
    return {name: shape for name, shape in found.items() if name.startswith("nv_inference_")}


def test_every_family_of_triton_has_its_help_type_and_labels() -> None:
    theirs, ours = form(RECORDED.read_text()), form("\n".join(lines([model("slow")])))
    assert theirs
    assert {name: ours.get(name) for name in theirs} == theirs


def test_instances_that_stand_still_are_counted() -> None:
    made = model()
    instances = [FakeInstance(f"m_{number}") for number in range(3)]
    for number, instance in enumerate(instances):
        made.instances.add(instance)
        made.instances.set_condition(instance, Condition("", stopped=number == 0))
    made.statistics.execution_timeouts = 4
    assert value_of([made], "naiad_model_instance_stopped_count") == 1
    assert value_of([made], "naiad_model_instance_busy_count") == 2
    assert value_of([made], "naiad_worker_execution_timeouts_total") == 4


def test_autoscaling_has_series_only_for_models_that_have_it() -> None:
    fixed, scaled = model("fixed"), model("scaled")
    scaled.statistics.autoscale_instances = 3
    scaled.statistics.autoscaled_up, scaled.statistics.autoscaled_down = 5, 2
    found = [line for line in lines([fixed, scaled]) if line.startswith("naiad_autoscale")]
    assert found == [
        'naiad_autoscale_instances{model="scaled",version="1"} 3',
        'naiad_autoscale_added_total{model="scaled",version="1"} 5',
        'naiad_autoscale_removed_total{model="scaled",version="1"} 2',
    ]


def test_each_version_is_one_or_zero() -> None:
    items = [IndexItem("a", "1", "READY"), IndexItem("a", "2", "LOADING"), IndexItem("b", "", "UNAVAILABLE", "broken")]
    assert [line for line in render_readiness(items) if not line.startswith("#")] == [
        'naiad_model_ready{model="a",version="1"} 1',
        'naiad_model_ready{model="a",version="2"} 0',
        'naiad_model_ready{model="b",version=""} 0',
    ]


def test_models_of_one_name_are_one_series_that_is_one_if_all_can_execute() -> None:
    items = [
        IndexItem("a", "1", "READY"),
        IndexItem("a", "1", "UNAVAILABLE", "it failed"),
        IndexItem("a", "1", "READY"),
    ]
    assert render_readiness(items)[2:] == ['naiad_model_ready{model="a",version="1"} 0']


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
