"""What a backend reports, on its way to the kernel.

A whole worker whose backend reports: what is sent, and when.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from backends.transport import wire
from backends.worker.reports import MAX_RESPONSE_INDEX, ReportCollector, stage_times
from backends.worker.request import WorkerRequest
from kernel.errors import InternalError, RequestCancelled
from tests.backends.worker.threaded_worker import RespondingLater, Scripted, echo, request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Timings
    from backends.worker.request import Responder
    from tests.backends.worker.threaded_worker import Bench

NOW = 1000


class Reports:
    """A collector, and what it has sent and logged. The responder of its requests, as far as reports go."""

    def __init__(self) -> None:
        self.sent: list[wire.ToKernel] = []
        self.logged: list[tuple[str, str]] = []
        self.reports = ReportCollector(self.sent.append, lambda *line: self.logged.append(line), lambda: NOW)

    def request(self, number: int = 1, *, traced: bool = False) -> WorkerRequest:
        trace = wire.TraceContext() if traced else None
        responder: Responder = self  # type: ignore[assignment]  # only its reports are used
        return WorkerRequest(wire.RequestMessage(number, [], id="r", trace=trace), [], responder)

    @property
    def last(self) -> wire.Reported:
        [message] = self.sent
        assert isinstance(message, wire.Reported)
        return message


def test_reports_are_sent_together_with_the_batch_that_ends() -> None:
    lab = Reports()
    lab.request(5).report(1, 2, 3, 4)
    lab.request(6).report(1, 2, 3, 4, success=False)
    assert lab.reports.pending
    lab.reports.flush(9, [(2, (1, 2, 3, 4))])
    times = wire.StageTimes(1, 2, 3, 4)
    assert lab.last == wire.Reported(
        9, [wire.RequestReport(5, times), wire.RequestReport(6, times, False)], [wire.BatchReport(2, times)]
    )
    assert not lab.reports.pending
    lab.reports.flush(10)
    assert len(lab.sent) == 1


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ((4, 3, 2, 1), (4, 4, 4, 4)),  # ends before it starts
        ((-5, 0, 1, 2), (0, 0, 1, 2)),
        ((1, 2, 3, NOW + 1), (1, 2, 3, NOW)),  # in the future
        ((10**18, 10**18 + 1, 10**18 + 2, 10**18 + 3), (NOW,) * 4),  # of the clock on the wall
    ],
)
def test_times_that_contradict_themselves_are_corrected(given: tuple[int, ...], kept: tuple[int, ...]) -> None:
    times, problem = stage_times(given, NOW)
    assert times == wire.StageTimes(*kept)
    assert "not in order, or not monotonic nanoseconds" in problem


def test_contradictions_are_logged_once() -> None:
    lab = Reports()
    for number in range(3):
        lab.request(number).report(4, 3, 2, 1)
    lab.reports.flush(1, [(0, (1, 2, 3, 4))])
    [(level, line)] = lab.logged
    assert level == "WARNING"
    assert line == (
        "a report of the backend contradicts itself: the times 4, 3, 2, 1 are not in order, or not monotonic "
        f"nanoseconds up to now ({NOW}) (this is logged once)"
    )
    assert lab.last.batches == [wire.BatchReport(1, wire.StageTimes(1, 2, 3, 4))]


def test_the_first_of_two_reports_of_a_request_counts() -> None:
    lab = Reports()
    request = lab.request()
    request.report(1, 2, 3, 4)
    request.report(5, 6, 7, 8)
    lab.reports.flush(1)
    assert [report.times.start_ns for report in lab.last.requests] == [1]
    assert "request 'r' was reported twice" in lab.logged[0][1]


def test_responses_are_reported_by_what_became_of_them() -> None:
    lab = Reports()
    request = lab.request()
    request.report_response(0, 1, 2, 3)
    request.report_response(1, 1, 2, 3, InternalError("no"))
    request.report_response(2, 1, None, 3)
    request.report_response(3, 1, None, 3, RequestCancelled())
    request.report_response(MAX_RESPONSE_INDEX + 1, 1, 2, 3)
    lab.reports.flush()
    assert lab.last.responses == [
        wire.ResponseReport(0, "success", 1, 2, 3),
        wire.ResponseReport(1, "fail", 1, 2, 3),
        wire.ResponseReport(2, "empty_response", 1, 3, 3),
        wire.ResponseReport(3, "cancel", 1, 3, 3),
    ]


def test_activities_of_traced_requests_are_sent_and_others_cost_nothing() -> None:
    lab = Reports()
    lab.request().report_activity("LOOKUP_START")
    assert not lab.reports.pending
    traced = lab.request(3, traced=True)
    traced.report_activity("LOOKUP_START", 17)
    traced.report_activity("LOOKUP_END")
    with pytest.raises(InternalError, match="must have 1 to 256 characters, got 0"):
        traced.report_activity("")
    lab.reports.flush()
    assert lab.last.activities == [wire.Activity(3, "LOOKUP_START", 17), wire.Activity(3, "LOOKUP_END", NOW)]


def test_memory_is_reported_when_the_kernel_takes_it_and_the_newest_report_counts() -> None:
    lab = Reports()
    lab.reports.memory([("CPU", 0, 1)])
    lab.reports.memory([("CPU", 0, 2), ("GPU", 1, 3)])
    assert lab.sent == []
    lab.reports.joined()
    lab.reports.memory([])
    assert lab.sent == [
        wire.MemoryUsed([wire.MemoryUse("CPU", 0, 2), wire.MemoryUse("GPU", 1, 3)]),
        wire.MemoryUsed([]),
    ]
    with pytest.raises(InternalError, match="a use of memory is a kind"):
        lab.reports.memory([("TPU", 0, 1)])


def test_a_long_stream_sends_its_reports_in_parts() -> None:
    lab = Reports()
    request = lab.request()
    for index in range(100):
        request.report_response(index, 1, 2, 3)
    assert [len(message.responses) for message in lab.sent if isinstance(message, wire.Reported)] == [64]


class Silent(Scripted):
    """Marks nothing and reports nothing."""

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        self.on_execute(requests)


class Loud(Scripted):
    """Reports one execution, and uses memory."""

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        self.host.report_memory([("CPU", 0, 7)])
        timings.report_batch(2, 1, 2, 3, 4)
        self.on_execute(requests)


def test_all_the_time_of_a_backend_that_marks_nothing_is_inference(bench: Bench) -> None:
    bench.load(kind=Silent)
    bench.send(wire.Execute(1, [request(1)]))
    executed = bench.next(wire.Executed)
    assert executed.compute_start_ns == executed.input_end_ns < executed.output_start_ns <= executed.compute_end_ns
    bench.stop()


def test_reports_come_before_the_end_of_their_batch(bench: Bench) -> None:
    def execute(requests: Sequence[WorkerRequest]) -> None:
        echo(requests)
        now = time.monotonic_ns()
        requests[0].report(now, now, now, now)

    bench.load(execute, kind=Loud)
    bench.send(wire.Joined(), wire.Execute(4, [request(1), request(2)]))
    assert bench.next(wire.MemoryUsed).uses == [wire.MemoryUse("CPU", 0, 7)]
    reported = bench.next(wire.Reported)
    assert reported.batch == 4
    assert [each.request for each in reported.requests] == [1]
    assert reported.batches == [wire.BatchReport(2, wire.StageTimes(1, 2, 3, 4))]
    assert bench.next(wire.Executed).batch == 4
    bench.stop()


def test_a_report_after_execute_comes_before_the_final_response(bench: Bench) -> None:
    go_on = threading.Event()
    threads: list[threading.Thread] = []

    def later(each: WorkerRequest) -> None:
        go_on.wait(60)
        each.report(1, 2, 3, 4)
        each.report_response(0, 1, 2, 3)
        echo([each])

    def execute(requests: Sequence[WorkerRequest]) -> None:
        threads.extend(threading.Thread(target=later, args=[each]) for each in requests)
        for thread in threads:
            thread.start()

    bench.load(execute, kind=RespondingLater)
    bench.send(wire.Execute(1, [request(1)]))
    assert bench.next(wire.Executed).responses == []
    go_on.set()
    reported = bench.next(wire.Reported)
    assert (reported.batch, len(reported.requests), len(reported.responses)) == (0, 1, 1)
    assert bench.next(wire.Responded).final
    for thread in threads:
        thread.join()
    bench.stop()


def test_a_contradiction_is_a_line_of_the_log(bench: Bench) -> None:
    def execute(requests: Sequence[WorkerRequest]) -> None:
        requests[0].report(4, 3, 2, 1)
        echo(requests)

    bench.load(execute)
    bench.send(wire.Execute(1, [request(1)]), wire.Execute(2, [request(2)]))
    assert "contradicts itself" in bench.next(wire.Log).text
    for batch in (1, 2):
        assert bench.next(wire.Reported).requests[0].times == wire.StageTimes(4, 4, 4, 4)
        assert bench.next(wire.Executed).batch == batch
    bench.stop()
