"""What becomes of requests whose worker is lost or stopped: each gets one final response and gives its leases back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from backends.transport import wire
from backends.transport.outbox import IN_MODEL
from kernel.errors import RequestCancelled, ServerStopping, WorkerLost
from kernel.loop.cancellations import MOST_AT_ONCE, MOST_WAITING
from kernel.serving.batch import Batch
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import Span, Tensor
from tests.backends.supervision.played_worker import (
    Bench,
    input_part,
    request_with_large_input,
    response,
    responses,
    run,
    settle,
)

if TYPE_CHECKING:
    from kernel.serving.response import Response


async def with_two_batches(bench: Bench) -> list[Request]:
    """Return three requests with large inputs of which the worker executes the first, and has the others ahead."""
    first = bench.submit()
    await bench.say(wire.Executed(1, [response()]))  # so fast that more are given at once
    assert responses(first) == ["ok"]
    requests = [request_with_large_input(bench) for _ in range(3)]
    await settle()
    assert len(bench.handle.record.batches) == 3
    return requests


def blocks_of(bench: Bench) -> int:
    assert bench.model.input_arena is not None
    return bench.model.input_arena.allocator.block_count


def test_requests_that_were_not_started_go_back_with_their_inputs() -> None:
    async def scenario(bench: Bench) -> None:
        started, *others = await with_two_batches(bench)
        bench.worker.die("killed by signal 9 (SIGKILL)")
        assert isinstance(started.sink, RecordingSink)
        [error] = started.sink.errors
        assert isinstance(error, WorkerLost)
        assert "killed by signal 9 (SIGKILL)" in error.message
        assert [responses(request) for request in others] == [[], []]
        assert bench.model.live.queued_requests() == others
        assert [request.in_use for request in (started, *others)] == [False] * 3
        assert blocks_of(bench) == 2, "another worker will execute them"

    run(scenario)


def test_a_request_that_was_cancelled_before_it_was_started_does_not_go_back() -> None:
    async def scenario(bench: Bench) -> None:
        _, cancelled, other, *_ = await with_two_batches(bench)
        cancelled.cancel()
        bench.worker.die("exit code 1")
        assert isinstance(cancelled.sink, RecordingSink)
        assert [type(error) for error in cancelled.sink.errors] == [RequestCancelled]
        assert bench.model.live.queued_requests() == [other]

    run(scenario)


class Resubmitting(RecordingSink):
    """A sink that submits another request as soon as its own has failed."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench
        self.next: Request | None = None

    def send(self, response: Response) -> None:
        super().send(response)
        self.next = self._bench.submit()


def test_a_request_that_is_submitted_while_those_of_the_lost_worker_fail_waits_for_another_worker() -> None:
    async def scenario(bench: Bench) -> None:
        sink = Resubmitting(bench)
        failing = Request("m", [Tensor("IN", "FP32", [1], bytes(4))], sink)
        bench.model.submit(failing)
        await settle()
        bench.worker.die("exit code 1")
        assert [type(error) for error in sink.errors] == [WorkerLost]
        assert sink.next is not None
        assert bench.model.live.queued_requests() == [sink.next], "it was given to the lost worker"

    run(scenario)


@pytest.mark.parametrize(
    ("progress", "error"),
    [
        (2 << 1, "was lost while it read the request, which had not reached the model (exit code 1)"),
        (2 << 1 | IN_MODEL, "was lost while it executed the request (exit code 1)"),
        (None, "was lost while it had the request, which may have reached the model (exit code 1)"),
    ],
)
def test_the_error_says_how_far_the_worker_was_with_the_request(progress: int | None, error: str) -> None:
    async def scenario(bench: Bench) -> None:
        if progress is not None:
            bench.worker.channel.share_outbox()
        begun, *others = await with_two_batches(bench)
        if progress is not None:
            bench.worker.channel.progress[0] = progress
        bench.worker.die("exit code 1")
        assert isinstance(begun.sink, RecordingSink)
        assert error in begun.sink.errors[0].message
        assert bench.model.live.queued_requests() == others

    run(scenario)


def test_a_request_that_was_dispatched_and_not_begun_goes_back_too() -> None:
    async def scenario(bench: Bench) -> None:
        bench.worker.channel.share_outbox()
        requests = await with_two_batches(bench)
        bench.worker.channel.progress[0] = 1 << 1 | IN_MODEL  # the batch before them
        bench.worker.die("killed by signal 9 (SIGKILL)")
        assert [responses(request) for request in requests] == [[], [], []]
        assert bench.model.live.queued_requests() == requests

    run(scenario)


def test_a_request_that_no_worker_survives_fails_although_none_has_begun_with_it() -> None:
    async def scenario(bench: Bench) -> None:
        bench.worker.channel.share_outbox()
        requests = await with_two_batches(bench)
        bench.worker.channel.progress[0] = 1 << 1 | IN_MODEL
        requests[0].lost_before_start = 3  # in workers before this one
        bench.worker.die("exit code 1")
        assert isinstance(requests[0].sink, RecordingSink)
        [error] = requests[0].sink.errors
        assert "was lost before it began with the request (exit code 1)" in error.message
        assert bench.model.live.queued_requests() == requests[1:]
        assert [request.lost_before_start for request in requests] == [4, 0, 0]

    run(scenario)


def test_requests_that_were_given_up_keep_their_inputs_until_the_worker_has_finished_with_them() -> None:
    async def scenario(bench: Bench) -> None:
        first, second, third = await with_two_batches(bench)
        bench.model.abandon(ServerStopping(""))
        assert [responses(request) for request in (first, second, third)] == [["ServerStopping"]] * 3
        assert blocks_of(bench) == 3, "the worker may read them"
        await bench.say(wire.Executed(2, [wire.ResponseMessage([input_part(first, "A", 0, 8192)])]))
        assert blocks_of(bench) == 2
        assert responses(first) == ["ServerStopping"], "a late response is dropped"
        await bench.say(wire.Responded(3, True), wire.Executed(3))
        assert blocks_of(bench) == 1

    run(scenario)


def test_requests_that_were_given_up_leave_no_leases_when_the_worker_is_lost() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await with_two_batches(bench)
        bench.model.abandon(ServerStopping(""))
        bench.worker.die("exit code 1")
        assert blocks_of(bench) == 0
        assert bench.model.in_flight == 0
        assert [responses(request) for request in requests] == [["ServerStopping"]] * 3

    run(scenario)


def test_requests_that_were_given_up_leave_no_leases_with_a_worker_that_was_stopped() -> None:
    async def scenario(bench: Bench) -> None:
        await with_two_batches(bench)
        bench.model.abandon(ServerStopping(""))
        await bench.session.stop(1.0)
        bench.handle.stopped()
        assert blocks_of(bench) == 0

    run(scenario)


def test_requests_of_a_warm_up_fail_with_their_worker_and_never_reach_the_scheduler() -> None:
    async def scenario(bench: Bench) -> None:
        bench.model.instances.set_apart(bench.handle)
        requests = [Request("m", [Tensor("IN", "FP32", [1], bytes(4))], RecordingSink()) for _ in range(2)]
        for request in requests:
            bench.model.instances.dispatch_apart(bench.handle, Batch([request]))
        await settle()
        bench.worker.die("exit code 1")
        assert [responses(request) for request in requests] == [["WorkerLost"]] * 2
        assert (bench.model.in_flight, bench.model.live.queued) == (0, 0)

    run(scenario)


def test_a_lost_worker_is_sent_nothing() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await bench.received()
        bench.worker.die("exit code 1")
        bench.handle.cancel(request)
        bench.handle.consumed(request, 1000)
        await settle()  # a message would fail: the connection is closed

    run(scenario)


@pytest.mark.parametrize(
    ("cause", "reported"), [("killed by signal 7 (SIGBUS)", 1), ("killed by signal 9 (SIGKILL)", 0)]
)
def test_a_worker_that_ended_by_a_bus_error_is_reported_to_the_regions_of_clients(cause: str, reported: int) -> None:
    async def scenario(bench: Bench) -> None:
        reports: list[int] = []
        region = Region("r", RegionKind.SYSTEM, FileHandle(os.memfd_create("r")), 64)
        region.on_fault = lambda mapped, used: reports.append(len(used))
        tensor = Tensor("IN", "FP32", [1], None, Span(region.lease(), 0, 4))
        request = Request("m", [tensor], RecordingSink(), leased=True)
        bench.model.submit(request)
        await settle()
        bench.worker.die(cause)
        assert reports == [1] * reported
        tensor.release()  # the request waits for another worker, or has its error
        region.drop()

    run(scenario)


class Cancelling(RecordingSink):
    """A sink that cancels another request as soon as its own has failed, as an ensemble does with its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.other: Request | None = None

    def send(self, response: Response) -> None:
        super().send(response)
        if response.error is not None and self.other is not None:
            self.other.cancel()


def test_a_request_that_is_cancelled_while_others_of_its_lost_worker_fail_is_not_queued_again() -> None:
    async def scenario(bench: Bench) -> None:
        begun, cancelled, other, *_ = await with_two_batches(bench)
        sink = Cancelling()
        begun.sink, sink.other = sink, cancelled
        bench.worker.die("exit code 1")
        assert [type(error) for error in sink.errors] == [WorkerLost]
        assert isinstance(cancelled.sink, RecordingSink)
        assert [type(error) for error in cancelled.sink.errors] == [RequestCancelled]
        assert bench.model.live.queued_requests() == [other]

    run(scenario)


def test_the_requests_of_a_large_batch_fail_some_in_each_iteration() -> None:
    async def scenario(bench: Bench) -> None:
        requests = [Request("m", [], RecordingSink(), owner=bench.model) for _ in range(1024)]
        for request in requests:
            bench.model.live.add(request)
        bench.model.instances.dispatch(bench.handle, Batch([*requests]))
        requests.append(request_with_large_input(bench))
        await bench.say(wire.Started(1), wire.Started(2))

        def ended() -> int:
            return sum(request.finished for request in requests)

        bench.worker.die("exit code 1")
        assert ended() <= MOST_AT_ONCE
        requests[-1].cancel()
        requests[-2].fail(ServerStopping("the server exits"))
        while not all(request.finished for request in requests):
            before = ended()
            bench.model.check()
            bench.clock.end_iteration()
            assert before < ended() <= before + MOST_WAITING
        assert {*map(str, map(responses, requests[:-2]))} == {"['WorkerLost']"}
        assert [responses(request) for request in requests[-2:]] == [["ServerStopping"], ["WorkerLost"]]
        assert not any(request.in_use for request in requests)
        assert blocks_of(bench) == 0

    run(scenario, concurrency=2)
