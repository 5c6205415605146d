"""When recorded requests are sent again."""

from __future__ import annotations

from kernel.command.replay.schedule import DueRequest, ReplaySchedule, due_times


def taken(schedule: ReplaySchedule, now_ns: int) -> list[int]:
    found = []
    while (index := schedule.take(now_ns)) is not None:
        found.append(index)
    return found


def test_the_recorded_spacing_is_divided_by_the_speed() -> None:
    assert due_times([1000, 1010, 1400], 1, 1000) == [0, 10, 400]
    assert due_times([1000, 1010, 1400], 2, 1000) == [0, 5, 200]
    assert due_times([1000, 1010, 1400], 0, 1000) == [0, 0, 0]
    assert due_times([], 1, 1000) == []


def test_long_pauses_are_shortened() -> None:
    assert due_times([1000, 1010, 9000, 9010], 1, 50) == [0, 10, 60, 70]
    assert due_times([1000, 1010, 9000], 100, 1000) == [0, 0, 80], "the pause is short at that speed"


def test_requests_are_taken_when_they_are_due() -> None:
    schedule = ReplaySchedule([DueRequest(0), DueRequest(5), DueRequest(5), DueRequest(9)], 10)
    assert (taken(schedule, 0), schedule.next_due_ns()) == ([0], 5)
    assert taken(schedule, 4) == []
    assert taken(schedule, 7) == [1, 2]
    assert schedule.latest_ns == 2
    assert taken(schedule, 9) == [3]
    assert schedule.next_due_ns() is None
    assert not schedule.ended_all
    for index in range(4):
        schedule.ended(index)
    assert schedule.ended_all


def test_no_more_requests_are_in_flight_than_the_concurrency_allows() -> None:
    schedule = ReplaySchedule([DueRequest(0)] * 3, 2)
    assert (taken(schedule, 0), schedule.next_due_ns()) == ([0, 1], None)
    schedule.ended(1)
    assert taken(schedule, 30) == [2]
    assert schedule.latest_ns == 30


def test_a_request_of_a_sequence_waits_for_the_one_before_it_and_for_no_other() -> None:
    requests = [DueRequest(0, "a"), DueRequest(0, "a"), DueRequest(0, "b"), DueRequest(0, "a"), DueRequest(0)]
    schedule = ReplaySchedule(requests, 10)
    assert taken(schedule, 0) == [0, 2, 4]
    schedule.ended(2)
    assert taken(schedule, 0) == []
    schedule.ended(0)
    assert taken(schedule, 0) == [1]
    schedule.ended(1)
    assert taken(schedule, 0) == [3]
    assert not schedule.ended_all
    schedule.ended(3)
    schedule.ended(4)
    assert schedule.ended_all


def test_a_freed_request_of_a_sequence_waits_for_the_concurrency() -> None:
    schedule = ReplaySchedule([DueRequest(0, "a"), DueRequest(0, "a"), DueRequest(0), DueRequest(0)], 2)
    assert taken(schedule, 0) == [0, 2]
    schedule.ended(0)
    assert taken(schedule, 0) == [1]
    schedule.ended(2)
    assert taken(schedule, 0) == [3]
