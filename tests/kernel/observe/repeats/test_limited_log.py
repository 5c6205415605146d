"""The log of errors that each request can cause."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kernel.observe.repeats.limited_log import LimitedLog
from kernel.observe.repeats.repeat_limit import FIRST_LINES, WINDOW_NS

if TYPE_CHECKING:
    import pytest


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_errors_that_repeat_are_logged_a_few_times_and_then_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LimitedLog(logging.getLogger("some"))
    found = [log.log("model 'x'", "request %d failed", number) for number in range(1000)]
    assert found == [True] * FIRST_LINES + [False] * (1000 - FIRST_LINES)
    assert texts(caplog) == [f"request {number} failed" for number in range(FIRST_LINES)]
    assert caplog.records[0].filename == "test_limited_log.py", "the line names the place of the error"
    caplog.clear()
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + WINDOW_NS)
    assert log._timer is not None
    assert log._timer.daemon
    log._timer.cancel()
    log._timer.function()
    assert texts(caplog) == ["990 more such errors of model 'x' in the last 10 s"]
    assert caplog.records[0].levelno == logging.ERROR


def test_what_was_left_out_is_also_said_before_the_next_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LimitedLog(logging.getLogger("some"))
    for _ in range(FIRST_LINES + 1):
        log.log("model 'x'", "failed")
    assert log._timer is not None
    log._timer.cancel()
    caplog.clear()
    now_ns = time.monotonic_ns()
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + WINDOW_NS)
    log.log("model 'x'", "failed", exc_info=ValueError("why"))
    assert texts(caplog) == ["1 more such errors of model 'x' in the last 10 s", "failed"]
    assert caplog.records[1].exc_info is not None


def test_a_server_without_many_errors_starts_no_thread() -> None:
    log = LimitedLog(logging.getLogger("some"))
    for _ in range(FIRST_LINES):
        log.log("model 'x'", "failed")
    assert log._timer is None
