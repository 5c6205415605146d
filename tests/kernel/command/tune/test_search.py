"""Which configurations are tried, and which one is the best."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kernel.command.bench.report.results import ClientFigures, LatencyFigures, PointRow
from kernel.command.tune.report import LatencyGoal, TuneRow, goes_on, load_problem, table_of
from kernel.command.tune.search import TuneCandidate, find_best

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
