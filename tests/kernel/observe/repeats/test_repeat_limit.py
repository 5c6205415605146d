"""Which lines that repeat are logged."""

from __future__ import annotations

from kernel.observe.repeats.repeat_limit import _MOST_SUBJECTS, FIRST_LINES, WINDOW_NS, RepeatLimit


def logged(limit: RepeatLimit, subject: str, now_ns: int, count: int) -> int:
    """Return how many of `count` lines are logged."""
    return sum(limit.take(subject, now_ns) for _ in range(count))


def test_the_first_lines_are_logged_and_the_others_counted() -> None:
    limit = RepeatLimit()
    assert logged(limit, "a", 5, 100) == FIRST_LINES
    assert limit.ended(5 + WINDOW_NS - 1) == []
    assert limit.ended(5 + WINDOW_NS) == [("a", 100 - FIRST_LINES)]


def test_subjects_are_counted_apart() -> None:
    limit = RepeatLimit()
    logged(limit, "a", 0, 100)
    assert logged(limit, "b", 0, 3) == 3
    assert limit.ended(WINDOW_NS) == [("a", 100 - FIRST_LINES)]


def test_while_errors_go_on_each_window_logs_one_of_them() -> None:
    limit = RepeatLimit()
    logged(limit, "a", 0, 100)
    limit.ended(WINDOW_NS)
    assert logged(limit, "a", WINDOW_NS, 50) == 1
    assert limit.ended(2 * WINDOW_NS) == [("a", 49)]


def test_after_a_window_with_few_lines_the_first_ones_are_logged_again() -> None:
    limit = RepeatLimit()
    logged(limit, "a", 0, 100)
    limit.ended(WINDOW_NS)
    logged(limit, "a", WINDOW_NS, 1)
    assert limit.ended(2 * WINDOW_NS) == []
    assert logged(limit, "a", 2 * WINDOW_NS, 100) == FIRST_LINES


def test_the_number_of_subjects_is_limited() -> None:
    limit = RepeatLimit()
    subjects = [str(number) for number in range(_MOST_SUBJECTS + 50)]
    assert sum(limit.take(subject, 0) for subject in subjects) == _MOST_SUBJECTS + FIRST_LINES
    assert limit.ended(WINDOW_NS) == [("others", 50 - FIRST_LINES)]
