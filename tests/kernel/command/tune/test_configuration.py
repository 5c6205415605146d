"""The settings in the JSON of a load request and in the text of a config.pbtxt."""

from __future__ import annotations

from typing import Any

import pytest

from kernel.command.tune.configuration import (
    FIELDS,
    batch_sizes,
    candidate_of,
    lost_settings,
    new_text,
    why_not,
    with_candidate,
    without_fields,
)
from kernel.command.tune.search import TuneCandidate
from kernel.config.load import from_pbtxt

CONFIG: dict[str, Any] = {
    "max_batch_size": 8,
    "instance_group": [{"name": "a", "count": 1, "kind": "KIND_CPU"}],
    "dynamic_batching": {"preferred_batch_size": [8], "max_queue_delay_microseconds": 0},
}

TEXT = """# max_batch_size: 3
name: "m { dynamic_batching"   # a name
max_batch_size: 8  # rows
backend: "python"
instance_group [
  { count: 2 kind: KIND_CPU }, # two
  { count: 1 }
]
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
dynamic_batching { preferred_batch_size: [4]
  max_queue_delay_microseconds: 10 }
output { name: "OUT" data_type: TYPE_FP32 dims: 4 }
parameters: { key: "instance_group" value: { string_value: "}" } }
"""


def test_a_candidate_goes_into_a_configuration_and_comes_out_of_it() -> None:
    assert candidate_of(CONFIG) == TuneCandidate(1, 8, 0)
    changed = with_candidate(CONFIG, TuneCandidate(3, 16, 500))
    assert candidate_of(changed) == TuneCandidate(3, 16, 500)
    assert changed["dynamic_batching"] == {"max_queue_delay_microseconds": 500}
    assert "dynamic_batching" not in with_candidate(CONFIG, TuneCandidate(3, 8, None))
    assert CONFIG["instance_group"][0]["count"] == 1


def test_preferred_sizes_that_a_person_has_chosen_stay() -> None:
    config = {**CONFIG, "dynamic_batching": {"preferred_batch_size": [2, 4]}}
    assert with_candidate(config, TuneCandidate(1, 16, 0))["dynamic_batching"]["preferred_batch_size"] == [2, 4]


def test_only_larger_batches_than_those_of_now_are_tried() -> None:
    assert batch_sizes(CONFIG) == [8, 16, 32, 64]
    assert batch_sizes({"max_batch_size": 100}) == [100]
    assert batch_sizes({"max_batch_size": 0}) == []


def test_the_text_keeps_everything_but_the_fields() -> None:
    kept = without_fields(TEXT, FIELDS)
    for line in ("# max_batch_size: 3", 'name: "m { dynamic_batching"   # a name', 'backend: "python"', "# rows"):
        assert line in kept
    before, after = from_pbtxt(TEXT.encode(), "config"), from_pbtxt(kept.encode(), "config")
    for field in FIELDS:
        before.ClearField(field)
    assert after == before


@pytest.mark.parametrize("text", [TEXT, "", TEXT.replace("\n", " \n\n"), TEXT.replace(": {", " {")])
def test_the_new_text_has_the_new_settings(text: str) -> None:
    changed = with_candidate(CONFIG, TuneCandidate(3, 16, 500))
    found = from_pbtxt(new_text(text, changed).encode(), "config")
    assert (found.max_batch_size, [group.count for group in found.instance_group]) == (16, [3])
    assert found.dynamic_batching.max_queue_delay_microseconds == 500
    if text:
        assert [tensor.name for tensor in found.input] == ["IN"]


def test_dynamic_batching_without_settings_is_written_too() -> None:
    text = new_text("", with_candidate(CONFIG, TuneCandidate(1, 8, 0)))
    assert "dynamic_batching { }" in text
    assert from_pbtxt(text.encode(), "config").HasField("dynamic_batching")


def test_settings_that_would_be_lost_are_named() -> None:
    assert lost_settings(CONFIG) == []
    config = {**CONFIG, "dynamic_batching": {"priority_levels": 2}, "instance_group": [{"rate_limiter": {"a": 1}}]}
    assert lost_settings(config) == ["priority_levels", "rate_limiter"]


@pytest.mark.parametrize(
    "config",
    [
        {"platform": "ensemble"},
        {"model_transaction_policy": {"decoupled": True}},
        {"sequence_batching": {}},
    ],
)
def test_models_that_cannot_be_tuned_are_refused(config: dict[str, Any]) -> None:
    assert why_not(config)
    assert not why_not(CONFIG)
