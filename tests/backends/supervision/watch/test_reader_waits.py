"""Requests whose responses nobody takes."""

from __future__ import annotations

from backends.supervision.watch.reader_waits import ReaderWaits
from kernel.serving.request import NO_SINK, Request


def test_a_request_is_overdue_when_nobody_has_taken_its_responses_for_the_limit() -> None:
    waits, request = ReaderWaits(), Request("m", [], NO_SINK)
    assert waits.overdue({request: 64}, 5, 10) == []
    assert waits.overdue({request: 64}, 14, 10) == []
    assert waits.overdue({request: 64}, 15, 10) == [request]


def test_the_time_begins_again_with_each_response_that_is_taken() -> None:
    waits, request = ReaderWaits(), Request("m", [], NO_SINK)
    assert waits.overdue({request: 64}, 0, 10) == []
    assert waits.overdue({request: 65}, 9, 10) == []
    assert waits.overdue({}, 12, 10) == []
    assert waits.overdue({request: 65}, 13, 10) == []
    assert waits.overdue({request: 65}, 22, 10) == []
    assert waits.overdue({request: 65}, 23, 10) == [request]


def test_each_request_has_a_time_of_its_own() -> None:
    waits, first, second = ReaderWaits(), Request("m", [], NO_SINK), Request("m", [], NO_SINK)
    assert waits.overdue({first: 1}, 0, 10) == []
    assert waits.overdue({first: 1, second: 1}, 9, 10) == []
    assert waits.overdue({first: 1, second: 1}, 10, 10) == [first]
