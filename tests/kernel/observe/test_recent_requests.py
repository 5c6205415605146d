"""Which requests are remembered: few slow ones, failures with how often they came, and their stages."""

from __future__ import annotations

from kernel.errors import InternalError
from kernel.observe.execution_reports import ExecutionTimes
from kernel.observe.histogram import Histogram
from kernel.observe.recent_requests import (
    LEAST_SLOW_NS,
    MOST_MODELS,
    MOST_OF_MODEL,
    RecentOfModel,
    RecentRequests,
    slow_ns,
)
from kernel.observe.statistics import ModelStatistics
from kernel.serving.batch import Batch
from kernel.serving.request import NO_SINK, Request
from kernel.serving.response import Response

MS = 1_000_000


def request_at(received_ns: int, request_id: str = "r", *, dispatched: bool = True) -> Request:
    request = Request("m", [], NO_SINK, id=request_id)
    request.received_ns, request.queue_start_ns, request.dispatched = received_ns, received_ns + 1 * MS, dispatched
    return request


def on_first(request: Request) -> str:
    return "m_0" if request.dispatched else ""


def watched() -> tuple[ModelStatistics, RecentOfModel]:
    statistics, recent = ModelStatistics(), RecentOfModel()
    statistics.note_requests(recent, 3, on_first)
    return statistics, recent


def test_a_slow_request_is_remembered_with_its_stages() -> None:
    statistics, recent = watched()
    request = request_at(100 * MS)
    times = ExecutionTimes(104 * MS, 105 * MS, 185 * MS, 190 * MS)
    statistics.record_execution(Batch([request], closed_by="delay", instance="m_0"), times, 200 * MS, 0)
    (found,) = recent.slow
    assert (found.version, found.request_id, found.total_ns, found.closed_by) == (3, "r", 100 * MS, "delay")
    assert found.instance == "m_0"
    assert [(name, begin // MS, end // MS) for name, begin, end in found.stages] == [
        ("prepare", 0, 1), ("queue", 1, 4), ("input", 4, 5), ("inference", 5, 85), ("output", 85, 90),
        ("respond", 90, 100),
    ]  # fmt: skip


def test_a_fast_request_is_not_remembered() -> None:
    statistics, recent = watched()
    times = ExecutionTimes(1 * MS, 2 * MS, 3 * MS, 4 * MS)
    statistics.record_execution(Batch([request_at(0)]), times, LEAST_SLOW_NS, 0)
    assert not recent.slow
    assert recent.change == 0


def test_what_most_requests_take_is_not_slow() -> None:
    statistics, recent = watched()
    for number in range(1000):
        at_ns = number * 1000 * MS
        times = ExecutionTimes(at_ns, at_ns, at_ns + 20 * MS, at_ns + 20 * MS)
        statistics.record_execution(Batch([request_at(at_ns, str(number))]), times, at_ns + 20 * MS, 0)
    assert [each.request_id for each in recent.slow] == ["0"]
    assert statistics.slow_ns == 25 * MS


def test_no_more_than_one_in_a_hundred_is_slow() -> None:
    durations = Histogram((0.01, 0.1, 1), 10**9)
    assert slow_ns(durations) >= LEAST_SLOW_NS
    durations.counts[:] = [990, 5, 5, 0]
    assert slow_ns(durations) == 10 * MS
    durations.counts[:] = [900, 95, 5, 0]
    assert slow_ns(durations) == 100 * MS
    durations.counts[:] = [0, 0, 0, 9]
    assert slow_ns(durations) == 1000 * MS
    assert slow_ns(Histogram(())) == LEAST_SLOW_NS


def test_after_a_slow_request_others_wait_for_their_turn() -> None:
    recent = RecentOfModel()
    for now_ns in (1000 * MS, 1050 * MS, 1100 * MS):
        recent.note_slow(request_at(0, str(now_ns // MS)), 1, now_ns)
    assert [each.request_id for each in recent.slow] == ["1000", "1100"]


def test_a_failed_request_gets_its_stages_when_its_batch_ends() -> None:
    statistics, recent = watched()
    request = request_at(0)
    request.failed = True
    statistics.record_failure(request, InternalError("broken\x1b[0m \ud800"), 9 * MS)
    (found,) = recent.failed
    assert (found.error, found.reason, found.stages) == ("broken\\u001b[0m ?", "BACKEND", [])
    assert found.instance == "m_0"
    batch = Batch([request, request_at(2 * MS)])
    statistics.record_execution(batch, ExecutionTimes(3 * MS, 3 * MS, 8 * MS, 8 * MS), 10 * MS, 0)
    assert [(name, begin // MS, end // MS) for name, begin, end in found.stages] == [
        ("prepare", 0, 1), ("queue", 1, 3), ("inference", 3, 8), ("respond", 8, 9),
    ]  # fmt: skip
    assert found.batch_requests == 2


def test_a_slow_request_of_a_stream_names_the_instance_that_has_it() -> None:
    statistics, recent = ModelStatistics(decoupled=True), RecentOfModel()
    statistics.note_requests(recent, 3, on_first)
    request = request_at(0)
    statistics.record_response(request, Response("m", "3", "r", outputs=[]), 50 * MS)
    assert [each.instance for each in recent.slow] == ["m_0"]


def test_a_request_that_was_never_executed_has_waited() -> None:
    recent = RecentOfModel()
    recent.note_failure(request_at(0, dispatched=False), 1, InternalError("late"), "REJECTED", 5 * MS, on_first)
    assert recent.failed[0].stages == [("prepare", 0, 1 * MS), ("queue", 1 * MS, 5 * MS)]
    assert recent.failed[0].instance == ""


def test_equal_failures_in_a_row_are_one_entry() -> None:
    recent = RecentOfModel()
    for now_ns in (0, 10 * MS, 20 * MS, 3000 * MS):
        recent.note_failure(request_at(0), 1, InternalError("same"), "BACKEND", now_ns, on_first)
    recent.note_failure(request_at(0), 1, InternalError("other"), "BACKEND", 3001 * MS, on_first)
    assert [(each.error, each.repeats) for each in recent.failed] == [("same", 2), ("same", 0), ("other", 0)]


def test_memory_is_bounded_by_requests_models_and_lengths() -> None:
    recent = RecentOfModel()
    for number in range(100):
        recent.note_failure(
            request_at(0, "x" * 10_000), 1, InternalError(f"{number} " * 10_000), "OTHER", number, on_first
        )
        recent.note_slow(request_at(0), 1, number * 1000 * MS)
    assert (len(recent.slow), len(recent.failed)) == (MOST_OF_MODEL, MOST_OF_MODEL)
    assert max(len(each.error) + len(each.request_id) for each in recent.failed) < 600

    requests = RecentRequests()
    for number in range(MOST_MODELS + 1):
        requests.add(str(number))
    assert requests.of("0") is None
    before = requests.of("5")
    assert before is not None
    assert requests.add("5") is before is requests.of("5"), "a reload loses what was remembered"


def test_clocks_of_processes_that_differ_give_no_negative_stage() -> None:
    recent = RecentOfModel()
    times = ExecutionTimes(0, 8 * MS, 7 * MS, 90 * MS)
    recent.note_slow(request_at(0), 1, 10 * MS, Batch([request_at(0)]), times)
    stages = recent.slow[0].stages
    assert all(begin < end for _, begin, end in stages)
    assert [end for _, _, end in stages[:-1]] == [begin for _, begin, _ in stages[1:]]
    assert stages[-1][2] == 10 * MS
