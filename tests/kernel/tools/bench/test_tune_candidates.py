"""Which configurations are tried, and which one is the best.

The settings in the JSON of a load request and in the text of a config.pbtxt.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kernel.config.load import from_pbtxt
from kernel.tools.bench.results import ClientFigures, LatencyFigures, PointRow
from kernel.tools.bench.tune_candidates import (
    FIELDS,
    LatencyGoal,
    TuneCandidate,
    TuneRow,
    batch_sizes,
    candidate_of,
    find_best,
    goes_on,
    load_problem,
    lost_settings,
    new_text,
    table_of,
    why_not,
    with_candidate,
    without_fields,
)

START = TuneCandidate(1, 8, None)

VALUES: dict[str, Any] = {"max_batch_size": [8, 16, 32], "delay_us": [0, 100, 500], "instances": [1, 2, 4]}


def search(rates: Any, values: Any = VALUES, start: TuneCandidate = START) -> tuple[TuneCandidate, list[TuneCandidate]]:
    """Return the best one, and the ones that were measured."""
    tried: list[TuneCandidate] = []

    def measure(candidate: TuneCandidate) -> float | None:
        tried.append(candidate)
        found: float | None = rates(candidate)
        return found

    return find_best(start, values, measure), tried


def test_the_peak_is_found_without_trying_everything() -> None:
    best, tried = search(
        lambda c: 100 - abs(c.max_batch_size - 16) - abs(c.instances - 2) * 10 + (c.delay_us == 0) * 20
    )
    assert best == TuneCandidate(2, 16, 0)
    assert tried[0] == START
    assert len(tried) == len(set(tried))
    assert len(tried) < 15


def test_more_instances_that_bring_nothing_are_not_taken() -> None:
    best, _ = search(lambda c: 100 + c.instances)
    assert best == START


def test_what_cannot_be_served_or_misses_the_goal_is_never_the_best() -> None:
    best, _ = search(lambda c: None if c.max_batch_size > 8 else 0.0 if c.delay_us == 500 else 50 * c.instances)
    assert best == TuneCandidate(4, 8, None)


def test_a_start_that_misses_the_goal_is_left_for_one_that_meets_it() -> None:
    best, _ = search(lambda c: 0.0 if c.instances == 1 else 10.0)
    assert best.instances == 2


def test_a_model_without_batches_has_only_instances() -> None:
    best, tried = search(lambda c: c.instances, {"instances": [1, 2, 4]}, TuneCandidate(1, 0, None))
    assert best == TuneCandidate(4, 0, None)
    assert len(tried) == 3


def load(connections: int, rate: float, p99_ms: float, **changes: Any) -> PointRow:
    found = PointRow(
        connections=connections, target_rate=0.0, seconds=1.0, completed=100, failed=0, rate=rate,
        latency=LatencyFigures(1.0, 1.0, {"99": p99_ms * 1e3}), client=ClientFigures(1.0, 0.1),
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


GOAL = LatencyGoal(20, "99")


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([], True),
        ([load(1, 10, 5)], True),
        ([load(1, 10, 50)], True),
        ([load(1, 10, 50), load(2, 10, 50)], False),
        ([load(1, 10, 5), load(2, 10, 5), load(4, 10, 6)], False),
        ([load(1, 10, 5), load(2, 10, 5), load(4, 20, 6)], True),
        ([load(1, 10, 5, failed=1)], False),
    ],
)
def test_the_load_grows_until_the_goal_is_missed_or_nothing_is_gained(loads: list[PointRow], expected: bool) -> None:
    assert goes_on(loads, GOAL) == expected


def test_the_table_has_the_highest_rate_within_the_goal() -> None:
    rows = [
        TuneRow(START, [load(1, 100, 5), load(2, 180, 15), load(4, 300, 30)]),
        TuneRow(TuneCandidate(2, 8, 100), [load(1, 10, 50)]),
        TuneRow(TuneCandidate(2, 16, 100), [], "does not load"),
    ]
    lines = table_of(rows, GOAL, START).splitlines()
    assert lines[1].split() == ["best", "1", "8", "off", "180", "2", "15.0", "ms"]
    assert lines[2].endswith("no load has p99 of at most 20 ms")
    assert lines[3].endswith("does not load")


def test_the_problem_of_a_configuration_is_one_line() -> None:
    error = (
        "the server returned 400: load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ValueError: "
        "max_batch_size is 8\n\nAt:\n  m/1/model.py(5): auto_complete_config\n;\n"
    )
    assert load_problem(error) == "Internal: ValueError: max_batch_size is 8"
    assert load_problem("the server returned 503: no memory left") == "the server returned 503: no memory left"
    assert load_problem("") == ""


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
