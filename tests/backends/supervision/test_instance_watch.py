"""When an instance that stands still is reported, and when its worker is ended.

Requests whose responses nobody takes.
"""

from __future__ import annotations

import pytest

from backends.supervision.instance_watch import (
    MESSAGE_LIMIT_NS,
    TERM_GRACE_NS,
    ExecutionLimits,
    InstanceWatch,
    ReaderWaits,
    Sight,
    WatchStep,
)
from kernel.serving.request import NO_SINK, Request

S = 1_000_000_000

#: A mark of a piece of work.
A, B = ("a", 1), ("b", 2)


def watch(*, report_s: float = 0, timeout_s: float = 0) -> InstanceWatch:
    return InstanceWatch(ExecutionLimits(int(report_s * S), int(timeout_s * S), "here"))


def test_time_counts_from_the_first_look_at_a_piece_of_work_and_ends_with_it() -> None:
    found = watch(timeout_s=10)
    busy = [found.look(Sight(at * S, marks)).busy_ns // S for at, marks in ((5, [A]), (8, [A]), (9, [B]), (12, []))]
    assert busy == [0, 3, 0, 0]


def test_the_oldest_of_several_pieces_counts() -> None:
    found = watch()
    for at, marks in ((1, [A]), (2, [A, B]), (4, [B])):
        finding = found.look(Sight(at * S, marks))
    assert finding.busy_ns == 2 * S


def test_without_limits_nothing_is_done() -> None:
    found = watch()
    for at in range(0, 100_000, 1000):
        finding = found.look(Sight(at * S, [A]))
        assert (finding.step, finding.overdue, finding.report) == (WatchStep.NONE, False, False)


def test_a_worker_gets_sigterm_at_its_limit_and_sigkill_after_the_grace() -> None:
    found = watch(timeout_s=2)
    at = [S, 3 * S - 1, 3 * S, 3 * S + TERM_GRACE_NS - 1, 3 * S + TERM_GRACE_NS, 9 * S]
    steps = [found.look(Sight(now_ns, [A])).step for now_ns in at]
    assert steps == [
        WatchStep.NONE,
        WatchStep.NONE,
        WatchStep.TERMINATE,
        WatchStep.NONE,
        WatchStep.KILL,
        WatchStep.KILL,
    ]


def test_a_worker_that_was_asked_to_end_is_killed_also_if_its_execution_has_ended() -> None:
    found = watch(timeout_s=2)
    steps = [found.look(Sight(at * S, marks)).step for at, marks in ((1, [A]), (3, [A]), (4, []))]
    assert steps == [WatchStep.NONE, WatchStep.TERMINATE, WatchStep.KILL]


def test_a_long_execution_is_reported_at_growing_intervals() -> None:
    found = watch(report_s=10)
    reported = [at for at in range(400) if found.look(Sight(at * S, [A])).report]
    assert reported == [10, 20, 40, 80, 160, 320]


def test_looks_that_come_late_report_once() -> None:
    found = watch(report_s=10)
    findings = [found.look(Sight(at * S, [A])) for at in (0, 100, 101, 160)]
    assert [(each.overdue, each.report) for each in findings] == [
        (False, False),
        (True, True),
        (True, False),
        (True, True),
    ]


def test_the_next_execution_is_reported_anew() -> None:
    found = watch(report_s=10)
    marks = [A] * 15 + [B] * 15
    reported = [at for at, mark in enumerate(marks) if found.look(Sight(at * S, [mark])).report]
    assert reported == [10, 25]


# ---- messages that do not end ---------------------------------------------------------------


@pytest.mark.parametrize("marks", [[], [A]])
def test_a_worker_that_does_not_send_the_rest_of_a_message_is_dropped(marks: list[tuple[str, int]]) -> None:
    found = watch()
    at = [S, S + MESSAGE_LIMIT_NS - 1, S + MESSAGE_LIMIT_NS]
    steps = [found.look(Sight(now_ns, marks, incomplete_since=7)).step for now_ns in at]
    assert steps == [WatchStep.NONE, WatchStep.NONE, WatchStep.DROP]


def test_a_message_that_was_completed_and_a_later_one_count_by_themselves() -> None:
    found = watch()
    half = MESSAGE_LIMIT_NS * 2 // 3
    for number in range(9):
        position = None if number == 5 else number // 2
        assert found.look(Sight(number * half, incomplete_since=position)).step is WatchStep.NONE


def test_a_process_that_is_stopped_within_a_send_may_send_the_rest_when_it_goes_on() -> None:
    found = watch()
    for now_ns, stopped in ((0, False), (MESSAGE_LIMIT_NS, True), (2 * MESSAGE_LIMIT_NS, False)):
        assert found.look(Sight(now_ns, stopped=stopped, incomplete_since=7)).step is WatchStep.NONE
    assert found.look(Sight(3 * MESSAGE_LIMIT_NS, incomplete_since=7)).step is WatchStep.DROP


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
