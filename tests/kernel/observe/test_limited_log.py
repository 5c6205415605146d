"""The log of errors that each request can cause.

Which lines that repeat are logged.

The limit of repeated lines as it is in a server.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import pytest

from kernel.observe.limited_log import FIRST_LINES, MOST_SUBJECTS, WINDOW_NS, LimitedLog, RepeatLimit

if TYPE_CHECKING:
    from tests.conftest import RecordedTimer


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_errors_that_repeat_are_logged_a_few_times_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, recorded_timers: list[RecordedTimer]
) -> None:
    log = LimitedLog(logging.getLogger("some"))
    found = [log.log("model 'x'", "request %d failed", number) for number in range(1000)]
    assert found == [True] * FIRST_LINES + [False] * (1000 - FIRST_LINES)
    assert texts(caplog) == [f"request {number} failed" for number in range(FIRST_LINES)]
    assert caplog.records[0].filename == "test_limited_log.py", "the line names the place of the error"
    caplog.clear()
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + WINDOW_NS)
    [timer] = recorded_timers
    assert timer.daemon
    timer.function()
    assert texts(caplog) == ["990 more such errors of model 'x' in the last 10 s"]
    assert caplog.records[0].levelno == logging.ERROR


@pytest.mark.usefixtures("recorded_timers")
def test_what_was_left_out_is_also_said_before_the_next_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LimitedLog(logging.getLogger("some"))
    for _ in range(FIRST_LINES + 1):
        log.log("model 'x'", "failed")
    caplog.clear()
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + WINDOW_NS)
    log.log("model 'x'", "failed", exc_info=ValueError("why"))
    assert texts(caplog) == ["1 more such errors of model 'x' in the last 10 s", "failed"]
    assert caplog.records[1].exc_info is not None


def test_a_server_without_many_errors_starts_no_thread(recorded_timers: list[RecordedTimer]) -> None:
    log = LimitedLog(logging.getLogger("some"))
    for _ in range(FIRST_LINES):
        log.log("model 'x'", "failed")
    assert recorded_timers == []


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
    subjects = [str(number) for number in range(MOST_SUBJECTS + 50)]
    assert sum(limit.take(subject, 0) for subject in subjects) == MOST_SUBJECTS + FIRST_LINES
    assert limit.ended(WINDOW_NS) == [("others", 50 - FIRST_LINES)]


@pytest.fixture(autouse=True)
def repeated_errors_are_logged() -> None:
    """In place of the fixture of all other tests."""
