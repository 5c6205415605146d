"""OpenMetrics: when it is chosen, that strict readers take it, and that only descriptions and exemplars differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as read_text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.observe.histogram import STAY_NS
from kernel.observe.metrics_config import FIRST_RESPONSE, REQUEST_DURATION, MetricsConfig
from kernel.serving.model import Model
from kernel.serving.model_figures import figures_of
from kernel.testing import FakeClock, model_spec
from kernel.texts import has_control, printable
from protocols.http.metrics.formats import label_text, number, prefers_openmetrics, tag_label, to_openmetrics
from protocols.http.metrics.model_families import render_models
from schedulers.direct import direct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import Metric


@pytest.mark.parametrize(
    ("tag", "label"),
    [("team", "_team"), ("a b\"c", "_a_b_c"), ("_x", "_x"), ("__x", "_x"), ("9", "_9"), ("é", "_"), ("", "_")],
)  # fmt: skip
def test_a_tag_makes_a_valid_label_behind_one_underscore(tag: str, label: str) -> None:
    assert tag_label(tag) == label


def test_labels_are_in_the_order_of_their_names() -> None:
    assert label_text({"model": "m", "_b": "2", "_a": "1"}) == '_a="1",_b="2",model="m"'


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (3.0, "3"), (0.25, "0.25"), (-1.0, "-1"), (0.00025, "0.00025"), (1e300, "1e+300"),
     (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")],
)  # fmt: skip
def test_numbers_are_written_as_prometheus_reads_them(value: float, text: str) -> None:
    assert number(value) == text


@given(st.text(max_size=30))
def test_any_text_comes_back_as_the_value_of_its_label_with_control_characters_written_out(value: str) -> None:
    line = f"x{{{label_text({'model': value})}}} 1\n"
    assert line.count("\n") == 1
    assert not has_control(line[:-1])
    (family,) = text_string_to_metric_families(line)
    (sample,) = family.samples
    assert sample.labels == {"model": printable(value, keep="\n").encode(errors="replace").decode()}


read_openmetrics: Callable[[str], Iterable[Metric]] = parser.text_string_to_metric_families

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)

ALL = MetricsConfig(histogram_latencies=True, summary_latencies=True)


def samples(families: Iterable[Metric]) -> dict[tuple[str, str], str]:
    """Return the values, as texts because some are NaN, by names and labels."""
    return {(s.name, str(sorted(s.labels.items()))): str(s.value) for family in families for s in family.samples}


def model(name: str = "m") -> Model:
    made = Model(model_spec(name), ModelConfig(), 1, direct, FakeClock())
    made.statistics.configure(ALL, ModelConfig())
    return made


@pytest.mark.parametrize(("accepts", "expected"), [
    ([PROMETHEUS], True), (["application/openmetrics-text"], True),
    (["application/openmetrics-text; version=1.0.0; charset=utf-8"], True),
    (["text/plain;q=0.5", "application/openmetrics-text;q=0.9"], True),
    (['application/openmetrics-text;version="1.0.0";escaping=allow-utf-8;q=0.5,text/plain;q=0.4'], True),
    ([], False), (["*/*"], False), (["text/plain;version=0.0.4"], False),
    (["text/plain, application/openmetrics-text;q=0.5"], False),
    (["application/openmetrics-text;q=0"], False), (["application/openmetrics-text;version=2.0.0"], False),
    (["application/openmetrics-text;q=best"], False),
])  # fmt: skip
def test_openmetrics_is_for_those_who_rank_it_above_the_text_format(accepts: list[str], expected: bool) -> None:
    assert prefers_openmetrics(accepts) is expected


def test_a_strict_reader_finds_the_same_samples_in_both_formats() -> None:
    served = model()
    served.statistics.durations.observe(700_000)
    page = "\n".join([*render_models([figures_of(served)], ALL, 0), ""])
    read = list(read_openmetrics(to_openmetrics(page.encode()).decode()))
    # The reader of the text format adds `_total` to the name of each counter.
    assert samples(read) == {
        (name.removesuffix("_total") if name.startswith("nv_") else name, labels): value
        for (name, labels), value in samples(read_text_format(page)).items()
    }
    kinds = {family.name: family.type for family in read}
    assert kinds["nv_inference_count"] == "unknown", "its name does not end in _total"
    assert (kinds["naiad_worker_lost"], kinds[REQUEST_DURATION]) == ("counter", "histogram")


@pytest.mark.parametrize(("page", "expected"), [
    ('# HELP a says "so"\n# TYPE a gauge\na 1\n', '# HELP a says \\"so\\"\n# TYPE a gauge\na 1\n# EOF\n'),
    ("# TYPE b_total counter\nb_total 1\n", "# TYPE b counter\nb_total 1\n# EOF\n"),
    ("# TYPE b_total counter\nb_total 1\n# TYPE b gauge\nb 2\n",
     "# TYPE b_total unknown\nb_total 1\n# TYPE b gauge\nb 2\n# EOF\n"),
    ("", "# EOF\n"),
])  # fmt: skip
def test_descriptions_fit_the_rules_of_openmetrics(page: str, expected: str) -> None:
    assert to_openmetrics(page.encode()).decode() == expected


def test_the_bucket_of_a_traced_request_has_its_trace() -> None:
    served = model()
    for duration_ns in (700_000, 90_000_000_000):
        served.statistics.durations.observe(duration_ns)
    served.statistics.record_traced(700_000, "17", 2 * 10**9)
    served.statistics.record_traced(90_000_000_000, "0af7651916cd43dd8448eb211c80319c", 3 * 10**9)
    lines = render_models([figures_of(served)], ALL, 0, 10**18)
    read = read_openmetrics(to_openmetrics("\n".join(lines).encode()).decode())
    (family,) = (family for family in read if family.name == REQUEST_DURATION)
    found = {sample.labels["le"]: sample.exemplar for sample in family.samples if sample.exemplar}
    assert [(le, each.labels, each.value, float(each.timestamp or 0)) for le, each in found.items()] == [
        ("0.001", {"trace_id": "17"}, 0.0007, 1_000_000_002),
        ("+Inf", {"trace_id": "0af7651916cd43dd8448eb211c80319c"}, 90, 1_000_000_003),
    ]
    assert not any("trace_id" in line for line in render_models([figures_of(served)], ALL, 0)), "in the text format"


def test_the_bucket_of_a_first_response_has_its_trace() -> None:
    served = model()
    assert served.statistics.first_responses is not None
    served.statistics.first_responses.observe(90)
    served.statistics.record_traced(90_000_000, "17", 2 * 10**9)
    lines = render_models([figures_of(served)], ALL, 0, 10**18)
    read = read_openmetrics(to_openmetrics("\n".join(lines).encode()).decode())
    (family,) = (family for family in read if family.name == FIRST_RESPONSE)
    found = [(s.labels["le"], s.exemplar) for s in family.samples if s.exemplar]
    assert [(le, each.labels, each.value, float(each.timestamp or 0)) for le, each in found] == [
        ("100", {"trace_id": "17"}, 90, 1_000_000_002)
    ]


def test_an_example_stays_for_a_second() -> None:
    statistics = model().statistics
    statistics.record_traced(700_000, "1", 10**9)
    exemplars = statistics.exemplars
    assert exemplars is not None
    assert not exemplars.due(800_000, 10**9 + STAY_NS - 1)
    assert exemplars.due(800_000, 10**9 + STAY_NS)
    assert exemplars.due(5_000_000, 10**9), "another bucket"
