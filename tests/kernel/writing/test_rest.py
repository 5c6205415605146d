"""How long a helper rests before it writes again."""

from __future__ import annotations

import pytest

from kernel.writing.rest import is_behind, rest_s


@pytest.mark.parametrize(
    ("took_s", "waiting", "next_task", "expected_s"),
    [
        (0.01, 0.5, 0.5, 0.25),
        (0.2, 0.5, 0.5, 2.0),
        (0.2, 1.0, 1.0, 0.0),
        (0.2, 1.5, 0.5, 0.0),
        (0.2, 2.0, 0.001, 2.0),
        (0.001, 2.0, 0.001, 0.01),
        (0.0, 0.0, 0.0, 0.25),
    ],
)
def test_it_rests_ten_times_as_long_as_it_has_worked_unless_a_large_task_and_more_wait(
    took_s: float, waiting: float, next_task: float, expected_s: float
) -> None:
    assert rest_s(took_s, 10, 0.25, waiting, next_task) == pytest.approx(expected_s)


def test_without_a_factor_what_is_not_a_whole_task_waits_for_more() -> None:
    assert rest_s(5.0, 0, 0.25, 0.9, 0.9) == 0.25
    assert rest_s(5.0, 0, 0.25, 1.0, 0.001) == 0.0


def test_it_is_behind_when_a_whole_task_waits_and_the_next_is_worth_its_costs() -> None:
    assert is_behind(1.0, 1.0)
    assert not is_behind(0.99, 0.99)
    assert not is_behind(5.0, 0.1)
