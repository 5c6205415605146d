"""`pb_utils.MetricFamily`, as models use it. The texts are Triton's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.base import ModelArguments
from backends.python import instance
from backends.python.failures import TritonModelException
from backends.python.metrics import Metric, MetricFamily

if TYPE_CHECKING:
    from tests.backends.python.conftest import Lab

#: Triton's text before an error of the server.
SERVER = "Failed to process the request for model 'lab_0_0', message:"
CREATING = f"Error when creating Metric: {SERVER}"
COUNTER, GAUGE, HISTOGRAM = MetricFamily.COUNTER, MetricFamily.GAUGE, MetricFamily.HISTOGRAM


@pytest.fixture(autouse=True)
def in_a_model(lab: Lab) -> None:
    instance.set_current_instance(instance.PythonInstance(ModelArguments({"name": "lab"}, lab.dir, 1, "lab_0_0"), lab))


def test_a_model_defines_and_increments_metrics(lab: Lab) -> None:
    lab.load("""
        def initialize(self, args):
            self.family = pb_utils.MetricFamily(
                name="requests_total", description="requests by user", kind=pb_utils.MetricFamily.COUNTER
            )
            self.total = self.family.Metric(labels={"user": "a"})

        def execute(self, requests):
            for request in requests:
                self.total.increment(1)
            return [text(self.total.value())]
    """)
    assert [lab.text(), lab.text()] == ["1.0", "2.0"]
    (message,) = lab.registry.take()
    assert message.families[0].description == "requests by user"
    assert message.created[0].labels == {"user": "a"}
    assert message.changes[0].added == 2


def test_values_may_have_any_number_type() -> None:
    counter, gauge = (MetricFamily(name, "", kind) for name, kind in (("c", COUNTER), ("g", GAUGE)))
    histogram = MetricFamily("h", "", HISTOGRAM)
    one, level = counter.Metric(), gauge.Metric(labels={})
    values: list[Any] = [1, 2.5, np.float32(0.5), np.float64(1), np.array(1.0), True]
    for value in values:
        one.increment(value)
    assert one.value() == 7.0
    assert type(one.value()) is float
    level.set(4)
    level.increment(-5)
    assert level.value() == -1.0
    histogram.Metric(buckets=[1, 2.5]).observe(2)


def test_a_family_may_have_a_name_and_a_description_in_bytes() -> None:
    family = MetricFamily(b"requests", b"Number of requests.", MetricFamily.COUNTER)  # type: ignore[arg-type]
    family.Metric().increment(1)
    again = MetricFamily("requests", "Number of requests.", MetricFamily.COUNTER)
    assert again.Metric().value() == 1


def test_the_same_labels_are_the_same_metric() -> None:
    first, second = MetricFamily("x", "first", COUNTER), MetricFamily("x", "second", COUNTER)
    metric = first.Metric(labels={"a": "1", "b": "2"})
    assert first.Metric(labels={"b": "2", "a": "1"}) is metric
    other = second.Metric({"a": "1", "b": "2"})
    metric.increment(7.5)
    assert other.value() == 7.5
    assert first.Metric().value() == first.Metric(None).value() == first.Metric({}).value() == 0


def test_a_metric_is_deleted_with_its_family_object(lab: Lab) -> None:
    family = MetricFamily("x", "", GAUGE)
    metric, same = family.Metric(), family.Metric()
    other_family = MetricFamily("x", "", GAUGE)
    other = other_family.Metric()
    lab.registry.take()
    del family
    for call in (lambda: metric.increment(1), lambda: same.set(1), lambda: metric.observe(1), metric.value):
        with pytest.raises(TritonModelException, match="Invalid metric operation as the corresponding 'MetricFamily' "):
            call()
    assert lab.registry.take() == []
    assert other.value() == 0
    del other_family
    assert [message.removed for message in lab.registry.take()] == [[1]]


@pytest.mark.parametrize(
    ("name", "text"), [("a b", "Invalid metric name"), ("nv_inference_count", "Family name already exists")]
)
def test_a_family_with_a_wrong_name_is_refused(name: str, text: str) -> None:
    with pytest.raises(TritonModelException, match=f"^Error when creating MetricFamily: {SERVER} {text}$"):
        MetricFamily(name, "", COUNTER)


def test_a_name_has_one_kind() -> None:
    family = MetricFamily("x", "", COUNTER)
    text = f"^Error when creating MetricFamily: {SERVER} Family name already exists with different type$"
    with pytest.raises(TritonModelException, match=text):
        MetricFamily("x", "", GAUGE)
    assert family.Metric().value() == 0


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (COUNTER, {"labels": [("a", "1")]}, "Failed to create metric. Labels must be a dictionary."),
        (
            COUNTER,
            {"labels": {"a": 1}},
            f"{CREATING} attempt to access JSON non-string as string",
        ),
        (COUNTER, {"labels": {"__a": "1"}}, f"{CREATING} Invalid label name"),
        (HISTOGRAM, {"labels": {"le": "1"}, "buckets": []}, f"{CREATING} Invalid label name"),
        (COUNTER, {"buckets": []}, "Failed to create metric. Unexpected buckets found."),
        (GAUGE, {"buckets": [1.0]}, "Failed to create metric. Unexpected buckets found."),
        (HISTOGRAM, {}, "Failed to create metric. Missing required buckets."),
        (HISTOGRAM, {"buckets": (1.0,)}, "Failed to create metric. Buckets must be a list."),
        (
            HISTOGRAM,
            {"buckets": [2, 1]},
            f"{CREATING} Bucket Boundaries must be strictly sorted",
        ),
    ],
)
def test_wrong_labels_and_buckets_are_refused(kind: Any, arguments: dict[str, Any], text: str) -> None:
    family = MetricFamily("x", "", kind)
    with pytest.raises(TritonModelException) as raised:
        family.Metric(**arguments)
    assert str(raised.value) == text


KIND = f"{SERVER} TRITONSERVER_METRIC_KIND"
DOWN = "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."


@pytest.mark.parametrize(
    ("kind", "call", "text"),
    [
        (COUNTER, "increment", f"Failed to increment metric value: {SERVER} {DOWN}"),
        (COUNTER, "set", f"Failed to set metric value: {KIND}_COUNTER does not support Set"),
        (
            GAUGE,
            "observe",
            f"Failed to observe metric value: {KIND}_GAUGE does not support Observe",
        ),
        (
            HISTOGRAM,
            "set",
            f"Failed to set metric value: {KIND}_HISTOGRAM does not support Set",
        ),
        (
            HISTOGRAM,
            "value",
            f"Failed to get metric value: {KIND}_HISTOGRAM does not support Value",
        ),
    ],
)
def test_operations_of_other_kinds_are_refused(kind: Any, call: str, text: str) -> None:
    family = MetricFamily("x", "", kind)
    metric = family.Metric(buckets=[1.0] if kind is HISTOGRAM else None)
    with pytest.raises(TritonModelException) as raised:
        getattr(metric, call)(*[] if call == "value" else [-1])
    assert str(raised.value) == text


def test_values_that_are_not_numbers_are_refused() -> None:
    family = MetricFamily("x", "", COUNTER)
    metric: Metric = family.Metric()
    wrong: Any
    for wrong in ("1", None, [1]):
        with pytest.raises(TypeError, match=r"^increment\(\): incompatible function arguments"):
            metric.increment(wrong)
    family = MetricFamily("h", "", HISTOGRAM)
    with pytest.raises(RuntimeError, match=r"^Unable to cast Python instance to C\+\+ type"):
        family.Metric(buckets=["1"])  # type: ignore[list-item]  # as a model may
    with pytest.raises(TypeError, match=r"^__init__\(\): incompatible constructor arguments"):
        MetricFamily("x", "", 0)  # type: ignore[arg-type]  # as a model may
