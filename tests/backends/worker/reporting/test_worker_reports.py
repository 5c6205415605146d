"""A whole worker whose backend reports: what is sent, and when."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from backends.transport import wire
from tests.backends.worker.threaded_worker import RespondingLater, Scripted, echo, request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Timings
    from backends.worker.request import WorkerRequest
    from tests.backends.worker.threaded_worker import Bench


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
        go_on.wait(20)
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
