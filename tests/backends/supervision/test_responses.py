"""The responses of a large batch are sent on in pieces, one in each event-loop iteration; nothing overtakes them.

How many responses of a stream a worker may send before its client has taken others.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from backends.supervision.handle import WorkerHandle
from backends.supervision.responses import StreamCredit
from backends.transport import wire
from kernel.errors import ServerStopping
from kernel.serving.batch import Batch
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from shm.tensor import Tensor
from tests.backends.supervision.played_worker import Bench, output_block, response, responses, run, settle

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = WorkerHandle.most_at_once

COUNT = 1024


def queued(bench: Bench, **more: object) -> Request:
    request = Request("m", [Tensor("IN", "FP32", [1], bytes(4))], RecordingSink(), owner=bench.model, **more)  # type: ignore[arg-type]
    bench.model.live.add(request)
    return request


async def dispatched(bench: Bench, count: int = COUNT) -> list[Request]:
    """Return the requests of a batch that the worker executes."""
    requests = [queued(bench) for _ in range(count)]
    bench.model.instances.dispatch(bench.handle, Batch([*requests]))
    await bench.received()
    return requests


async def until(condition: Callable[[], bool]) -> None:
    """Return as soon as `condition` holds, in the iteration after which it does."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never holds")


def finished(requests: list[Request]) -> int:
    return sum(request.finished for request in requests)


async def first_piece(bench: Bench, requests: list[Request], *more: wire.ToKernel) -> None:
    """Let the worker answer a batch, and send `more` at once, and return when the first piece is handled."""
    executed = wire.Executed(1, [response(str(number).encode()) for number in range(len(requests))])
    bench.worker.channel.send(executed)
    for message in more:
        bench.worker.channel.send(message)
    await until(lambda: finished(requests) > 0)
    assert finished(requests) == MOST


def data(request: Request) -> list[bytes]:
    assert isinstance(request.sink, RecordingSink)
    return [bytes(output.raw()) for each in request.sink.responses for output in each.outputs or ()]


def test_a_large_batch_takes_an_iteration_for_each_piece() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench)
        await first_piece(bench, requests)
        done = [MOST]
        while done[-1] < COUNT:
            assert list(bench.handle.record.batches) == [1], "the batch ends with its last response"
            bench.model.check()
            await asyncio.sleep(0)
            done.append(finished(requests))
        assert done == list(range(MOST, COUNT + 1, MOST))
        await settle()
        assert bench.handle.record.batches == {}
        assert [data(request) for request in requests] == [[str(number).encode()] for number in range(COUNT)]
        assert bench.model.statistics.execution_count == 1
        assert bench.model.statistics.success.count == COUNT

    run(scenario)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_batch_of_one_piece_is_answered_at_once(concurrency: int) -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench, MOST)
        if concurrency > 1:
            await bench.say(wire.Started(1))
        await first_piece(bench, requests)
        assert bench.handle.record.batches == {}

    run(scenario, concurrency=concurrency)


def test_what_the_worker_says_next_is_handled_after_the_rest() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench)
        following = queued(bench)
        bench.model.instances.dispatch(bench.handle, Batch([following]))
        await bench.received()
        await first_piece(bench, requests, wire.Executed(2, [response(b"next")]))
        bench.worker.channel.send(wire.Log("INFO", "this is not read yet"))
        bench.session.take_unsent()
        await until(lambda: following.finished)
        assert finished(requests) == COUNT
        assert data(following) == [b"next"]
        assert not bench.lost

    run(scenario)


def test_two_large_batches_that_come_together_are_answered_in_order() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench, 3 * MOST)
        others = await dispatched(bench, 3 * MOST)
        await first_piece(bench, requests, wire.Executed(2, [response()] * len(others)))
        seen = []
        while finished(others) < len(others):
            await asyncio.sleep(0)
            seen.append((finished(requests), finished(others)))
        assert all(first == len(requests) for first, second in seen if second)
        assert len({second for _, second in seen}) >= 3, "the second one in pieces too"
        await settle()
        assert bench.model.statistics.execution_count == 2

    run(scenario)


def test_a_worker_that_dies_between_the_pieces_is_lost_after_the_last_one() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench)
        others = await dispatched(bench, 2 * MOST)
        following = queued(bench)
        bench.model.instances.dispatch(bench.handle, Batch([following]))
        await bench.received()
        everything = [*requests, *others, following]
        last = wire.Executed(3, [response(b"last")])
        await first_piece(bench, requests, wire.Executed(2, [response()] * len(others)), last)
        bench.worker.die("killed by signal 9 (SIGKILL)")
        done = [finished(everything)]
        while not bench.lost:
            await asyncio.sleep(0)
            done.append(finished(everything))
        assert bench.lost == ["killed by signal 9 (SIGKILL)"]
        assert done[-1] == len(everything), "what it has sent is not lost"
        assert max(after - before for before, after in itertools.pairwise(done)) <= 2 * MOST
        assert {*map(str, map(responses, everything))} == {"['ok']"}
        await settle()
        assert {*map(len, map(responses, everything))} == {1}

    run(scenario)


def test_a_request_that_is_cancelled_between_the_pieces_is_answered_once() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench)
        await first_piece(bench, requests)
        requests[MOST].cancel()
        requests[-1].cancel()
        await until(lambda: requests[-1].finished)
        await settle()
        assert responses(requests[MOST]) == responses(requests[-1]) == ["ok"]
        assert not bench.lost

    run(scenario)


def test_requests_that_the_server_abandons_between_the_pieces_are_answered_once() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench)
        await first_piece(bench, requests)
        bench.model.abandon(ServerStopping("the server exits"))
        await settle()
        await until(lambda: not bench.handle.record.batches)
        assert {*map(str, map(responses, requests[:MOST]))} == {"['ok']"}
        assert {*map(str, map(responses, requests[MOST:]))} == {"['ServerStopping']"}
        assert not bench.lost

    run(scenario)


def test_draining_waits_for_the_last_piece() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench)
        await first_piece(bench, requests)
        bench.model.instances.set_apart(bench.handle)
        await bench.handle.drain()
        assert finished(requests) == COUNT
        assert bench.handle.record.batches == {}

    run(scenario)


def test_the_instance_is_busy_until_the_last_piece() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench)
        await first_piece(bench, requests)
        waiting = bench.submit()
        await asyncio.sleep(0)
        assert bench.received_now() == []
        [execute] = [each for _ in range(4) for each in await bench.received() if isinstance(each, wire.Execute)]
        assert execute.batch == 2
        assert finished(requests) == COUNT
        await bench.say(wire.Executed(2, [response()]))
        assert responses(waiting) == ["ok"]

    run(scenario)


def test_a_bad_response_in_a_later_piece_ends_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench, 3 * MOST)
        answers = (
            [response()] * (2 * MOST) + [wire.ResponseMessage([output_block("OUT", 0, 8)])] + [response()] * (MOST - 1)
        )
        await bench.say(wire.Executed(1, answers), wire.Executed(2))
        assert bench.lost
        bench.clock.end_iteration()
        assert [responses(request) for request in requests] == [["ok"]] * (2 * MOST) + [["WorkerLost"]] * MOST

    run(scenario)


@pytest.mark.parametrize("count", [COUNT - 1, COUNT + 1])
def test_a_wrong_number_of_responses_ends_the_worker(count: int) -> None:
    async def scenario(bench: Bench) -> None:
        requests = await dispatched(bench)
        bench.worker.channel.send(wire.Executed(1, [response()] * count))
        await settle()
        assert bench.lost
        while finished(requests) < COUNT:
            bench.clock.end_iteration()
        assert {*map(str, map(responses, requests))} == {"['WorkerLost']"}

    run(scenario)


def test_responses_for_a_batch_that_is_not_executed_end_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        await dispatched(bench)
        await bench.say(wire.Executed(2, [response()] * COUNT))
        assert bench.lost

    run(scenario)


def test_credit_is_sent_in_portions() -> None:
    sent: list[wire.ToWorker] = []
    credit = StreamCredit(sent.append)
    portion = wire.CREDIT_WINDOW // 4
    for _ in range(portion - 1):
        credit.consumed(7, 1)
    assert sent == []
    credit.consumed(7, 1)
    assert sent == [wire.Credit(7, portion)]
    assert (credit.granted, credit.unsent) == ({7: portion}, {7: 0})


def test_a_request_is_blocked_while_its_window_is_used_up() -> None:
    credit = StreamCredit(lambda _: None)
    request = Request("m", [], RecordingSink(), response_count=wire.CREDIT_WINDOW)
    assert list(credit.blocked({7: request})) == [request]
    credit.consumed(7, wire.CREDIT_WINDOW)
    assert credit.blocked({7: request}) == {}
    credit.forget(7)
    assert credit.granted == credit.unsent == {}
    request.cancelled = True
    assert credit.blocked({7: request}) == {}
