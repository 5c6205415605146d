from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kernel.texts import has_control, printable
from protocols.http.metrics.text import label_text, number, tag_label


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
