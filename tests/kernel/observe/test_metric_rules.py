from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel.errors import InvalidArgument
from kernel.observe.metric_rules import (
    MAX_BUCKETS,
    MAX_LABELS_LENGTH,
    RESERVED_PREFIXES,
    MetricKind,
    check_buckets,
    check_family_name,
    checked_labels,
    sample_names,
)

COUNTER, HISTOGRAM = MetricKind.COUNTER, MetricKind.HISTOGRAM
PROTOCOLS = Path(__file__).parents[3] / "protocols"


@pytest.mark.parametrize("name", ["requests", "vllm:tokens_total", "_a9", "nv_trt_llm_inflight", ":a"])
def test_valid_metric_names_are_accepted(name: str) -> None:
    check_family_name(name)


@pytest.mark.parametrize(
    "name", ["", "9a", "__a", "a b", "a-b", "a{x='1'} 1", "a 1\n# TYPE b counter\nb", "é", "a\n", "a\x00"]
)
def test_invalid_metric_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="^Invalid metric name$"):
        check_family_name(name)


def test_names_of_the_server_s_own_families_are_refused() -> None:
    names = {
        name
        for path in PROTOCOLS.rglob("*.py")
        for name in re.findall(r'"((?:nv|naiad)_[a-z_]+)"', path.read_text())
    }  # fmt: skip
    assert len(names) > 20
    for name in [*names, *RESERVED_PREFIXES]:
        with pytest.raises(InvalidArgument, match="^Family name already exists$"):
            check_family_name(name)


@pytest.mark.parametrize("name", ["", "9", "a-b", "__name__", "a:b", 'a="1",b', "a\n", "é"])
def test_invalid_label_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="^Invalid label name$"):
        checked_labels({name: "x"}, COUNTER)


def test_le_is_not_a_label_of_a_histogram() -> None:
    assert checked_labels({"le": "1"}, COUNTER) == (("le", "1"),)
    with pytest.raises(InvalidArgument, match="^Invalid label name$"):
        checked_labels({"le": "1"}, HISTOGRAM)


def test_labels_are_sorted_by_name_and_can_be_encoded() -> None:
    assert checked_labels({"b": "\ud800", "a": ""}, COUNTER) == (("a", ""), ("b", "?"))


def test_the_length_of_labels_is_limited() -> None:
    checked_labels({"a": "x" * (MAX_LABELS_LENGTH - 1)}, COUNTER)
    with pytest.raises(
        InvalidArgument, match=f"at most {MAX_LABELS_LENGTH} characters, found {MAX_LABELS_LENGTH + 1}$"
    ):
        checked_labels({"a": "x" * MAX_LABELS_LENGTH}, COUNTER)


@pytest.mark.parametrize("bounds", [[], [1.0], [-1.0, 0.5, float("inf")]])
def test_ascending_bounds_are_accepted(bounds: list[float]) -> None:
    check_buckets(bounds)


@pytest.mark.parametrize("bounds", [[1.0, 1.0], [2.0, 1.0], [float("nan")], [1.0, float("nan")]])
def test_bounds_that_do_not_ascend_are_refused(bounds: list[float]) -> None:
    with pytest.raises(InvalidArgument, match="^Bucket Boundaries must be strictly sorted$"):
        check_buckets(bounds)


def test_the_number_of_buckets_is_limited() -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        check_buckets([float(bound) for bound in range(MAX_BUCKETS + 1)])


def test_a_histogram_uses_the_names_of_its_samples() -> None:
    assert sample_names("a", COUNTER) == ["a"]
    assert sample_names("a", HISTOGRAM) == ["a", "a_count", "a_sum", "a_bucket"]
