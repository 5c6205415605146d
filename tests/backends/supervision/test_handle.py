"""The kernel's view of a worker: batches go out, responses come in, and nothing that a worker sends is trusted.

Errors of a worker say whether Triton would have found them before it queued the request.

What a backend reports reaches the statistics and the traces of the requests.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from backends.transport import wire
from kernel.errors import InternalError, InvalidArgument
from kernel.observe.execution_reports import MemoryUsage
from kernel.serving.batch import Batch
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from shm.tensor import Tensor
from tests.backends.supervision.played_worker import (
    Bench,
    output_block,
    response,
    responses,
    run,
    settle,
)

if TYPE_CHECKING:
    from kernel.serving.response import Response


def queued(bench: Bench, id: str = "", **more: object) -> Request:
    """Return a request that is queued, for a batch that the test dispatches."""
    request = Request("m", [Tensor("IN", "FP32", [1], bytes(4))], RecordingSink(), id=id, owner=bench.model, **more)  # type: ignore[arg-type]
    bench.model.live.add(request)
    return request


async def executing(bench: Bench, *entries: Request | None, **more: object) -> wire.Execute:
    """Dispatch a batch, and return what the worker is sent."""
    bench.model.instances.dispatch(bench.handle, Batch(list(entries), **more))  # type: ignore[arg-type]
    [message] = await bench.received()
    assert isinstance(message, wire.Execute)
    return message


def data(request: Request) -> list[bytes]:
    """Return the data of the one output of each response."""
    assert isinstance(request.sink, RecordingSink)
    return [bytes(output.raw()) for each in request.sink.responses for output in each.outputs or ()]


# ---- batches go out -------------------------------------------------------------------------


def test_a_batch_is_one_message_with_its_requests() -> None:
    async def scenario(bench: Bench) -> None:
        plain = queued(bench, "a")
        full = queued(
            bench, "b", sequence_start=True, correlation_id=7, priority=2, timeout_us=3, parameters={"p": 1.5}
        )
        ending = queued(bench, "c", sequence_end=True, correlation_id="s")
        execute = await executing(bench, plain, full, ending)
        inputs = [Tensor("IN", "FP32", [1], bytes(4))]
        assert execute.batch == 1
        assert execute.requests == [
            wire.RequestMessage(1, inputs, id="a"),
            wire.RequestMessage(2, inputs, [], "b", wire.SEQUENCE_START, 7, 2, 3, {"p": 1.5}),
            wire.RequestMessage(3, inputs, [], "c", wire.SEQUENCE_END, "s"),
        ]
        await bench.say(wire.Executed(1, [response()] * 3))
        next_one = queued(bench)
        execute = await executing(bench, next_one)
        assert (execute.batch, [message.number for message in execute.requests]) == (2, [4])
        await bench.say(wire.Executed(2, [response()]))

    run(scenario)


def test_batches_of_an_iteration_share_a_send_unless_one_is_to_be_sent_now() -> None:
    async def scenario(bench: Bench) -> None:
        for _ in range(2):
            bench.model.instances.dispatch(bench.handle, Batch([queued(bench)]))
            assert bench.received_now() == []
        bench.handle.send_now()
        assert [type(message) for message in bench.received_now()] == [wire.Execute] * 2
        assert await bench.received() == [], "nothing is sent twice"
        await bench.say(wire.Executed(1, [response()]), wire.Executed(2, [response()]))

    run(scenario)


def test_a_worker_counts_once_however_many_requests_it_has() -> None:
    async def scenario(bench: Bench) -> None:
        for number in (1, 2):
            bench.submit()
            bench.submit()
            await bench.received()
            assert bench.polling.busy_workers == 1
            await bench.say(wire.Executed(2 * number - 1, [response()]))
            await bench.received()
            assert bench.polling.busy_workers == 1
            await bench.say(wire.Executed(2 * number, [response()]))
            assert bench.polling.busy_workers == 0

    run(scenario)


def test_padding_is_sent_and_no_response_is_expected_for_it() -> None:
    async def scenario(bench: Bench) -> None:
        first, second = queued(bench), queued(bench)
        execute = await executing(bench, first, None, second, slots=[5, 6, 7])
        assert [(message.number, len(message.inputs), message.sequence) for message in execute.requests] == [
            (1, 1, wire.SequenceEntry(5)),
            (2, 0, wire.SequenceEntry(6, True)),
            (3, 1, wire.SequenceEntry(7)),
        ]
        await bench.say(wire.Executed(1, [response(b"1"), response(b"3")]))
        assert (data(first), data(second)) == ([b"1"], [b"3"])

    run(scenario)


def test_a_response_for_padding_ends_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        request = queued(bench)
        await executing(bench, None, request, slots=[0, 1])
        await bench.say(wire.Responded(1, True, response()))
        assert bench.lost
        assert responses(request) == ["WorkerLost"]

    run(scenario)


def test_the_client_has_gone() -> None:
    async def scenario(bench: Bench) -> None:
        running, done = bench.submit(), bench.submit()
        await bench.received()
        running.cancel()
        assert await bench.received() == [wire.Cancel([1])]
        await bench.say(wire.Executed(1, [wire.ResponseMessage(error_code="cancelled", error_text="gone")]))
        assert responses(running) == ["RequestCancelled"]
        await bench.say(wire.Executed(2, [response()]))
        bench.handle.cancel(done)
        assert [type(message) for message in await bench.received()] == [wire.Execute], "the worker is done with it"

    run(scenario)


def test_credit_is_given_back_in_portions() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await bench.received()
        portion = wire.CREDIT_WINDOW // 4
        for _ in range(portion - 1):
            request.consumed()
        assert await bench.received() == []
        request.consumed()
        assert await bench.received() == [wire.Credit(1, portion)]
        request.consumed(portion + 5)
        assert await bench.received() == [wire.Credit(1, portion + 5)]
        request.consumed(portion - 1)
        await bench.say(wire.Responded(1, True), wire.Executed(1))
        bench.handle.consumed(request, portion)
        assert await bench.received() == [], "the worker is done with it"

    run(scenario, decoupled=True)


# ---- responses come in ----------------------------------------------------------------------


def test_the_responses_of_a_batch_are_those_of_its_requests_in_order() -> None:
    async def scenario(bench: Bench) -> None:
        requests = [queued(bench, id) for id in "abc"]
        await executing(bench, *requests)
        failure = wire.ResponseMessage(error_code="invalid_arg", error_text="not this one")
        await bench.say(wire.Executed(1, [response(b"1"), failure, response(b"3")]))
        assert [data(request) for request in requests] == [[b"1"], [], [b"3"]]
        assert [responses(request) for request in requests] == [["ok"], ["InvalidArgument"], ["ok"]]
        assert isinstance(requests[1].sink, RecordingSink)
        assert requests[1].sink.errors[0].message == "not this one"
        assert not bench.handle.record.batches

    run(scenario)


def test_a_failed_response_counts_as_one() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await bench.say(wire.Executed(1, [wire.ResponseMessage(error_code="internal", error_text="no")]))
        assert isinstance(request.sink, RecordingSink)
        [error] = request.sink.errors
        assert isinstance(error, InternalError)
        assert bench.model.statistics.failures["BACKEND"] == 1

    run(scenario)


def test_a_model_may_respond_many_times_and_after_its_batch_has_ended() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await bench.say(wire.Responded(1, False, response(b"1")), wire.Executed(1))
        assert bench.model.instances.idle_instance() is bench.handle, "it can execute the next batch"
        await bench.say(wire.Responded(1, False, response(b"2")), wire.Responded(1, True))
        assert data(request) == [b"1", b"2"]
        assert isinstance(request.sink, RecordingSink)
        assert [each.final for each in request.sink.responses] == [False, False, True]

    run(scenario, decoupled=True)


def test_the_times_of_a_worker_on_another_machine_become_the_kernels() -> None:
    async def scenario(bench: Bench) -> None:
        bench.session.clock_offset_ns = 1000
        request = bench.submit()
        start_ns = request.queue_start_ns - 1000 + 50  # the worker's clock, 50 ns later
        await bench.say(wire.Executed(1, [response()], start_ns, start_ns + 1, start_ns + 11, start_ns + 111))
        statistics = bench.model.statistics
        assert statistics.queue_ns == 50
        assert (statistics.input_ns, statistics.infer_ns, statistics.output_ns) == (1, 10, 100)

    run(scenario)


@pytest.mark.parametrize(
    "messages",
    [
        [wire.Executed(2, [response()])],
        [wire.Executed(0, [response()])],
        [wire.Executed(1, [response()] * 2)],
        [wire.Executed(1, [response()], 5, 4, 6, 7)],
        [wire.Executed(1, [response()], 5, 6, 7, 6)],
        [wire.Executed(1, [response()]), wire.Executed(1, [response()])],
        [wire.Responded(2, True, response())],
        [wire.Responded(1, True, response()), wire.Responded(1, True, response())],
        [wire.Executed(1, [response()]), wire.Responded(1, True, response())],
        [wire.Started(1)],
        [wire.Recalled([1])],
        [wire.Submit(1, "n", "", wire.RequestMessage(1, []), [1])],
        [wire.Responded(1, True, wire.ResponseMessage([Tensor("OUT", "UINT8", [1])]))],
        [wire.Responded(1, True, wire.ResponseMessage([output_block("OUT", 0, 1)]))],
        [wire.ArenaCreated(1 << 16)],
    ],
    ids=[
        "unknown batch", "number 0", "too many responses",
        "input stage that ends early", "output stage that ends early", "batch ended twice", "unknown request",
        "two final responses", "final response after the batch", "started without concurrency", "recalled unasked",
        "call without a kernel", "output without bytes", "output without arena", "arena without descriptor",
    ],
)  # fmt: skip
def test_what_no_worker_of_ours_sends_ends_the_worker(messages: list[wire.ToKernel]) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        await bench.say(*messages)
        assert len(bench.lost) == 1
        assert "it sent an invalid message" in bench.lost[0]
        assert len(responses(request)) == 1
        assert bench.model.in_flight == 0

    run(scenario)


def test_too_few_responses_fail_all_requests_of_the_batch() -> None:
    async def scenario(bench: Bench) -> None:
        requests = [queued(bench) for _ in range(3)]
        await executing(bench, *requests)
        await bench.say(wire.Executed(1, [response()] * 2))
        assert "2 responses for a batch of 3 requests" in bench.lost[0]
        assert [responses(request) for request in requests] == [["WorkerLost"]] * 3

    run(scenario)


# ---- several batches at the same time -------------------------------------------------------


def test_a_worker_with_concurrency_says_what_it_starts_and_ends_batches_in_any_order() -> None:
    async def scenario(bench: Bench) -> None:
        requests = [bench.submit() for _ in range(2)]
        assert bench.model.instances.open_instance() is None
        await bench.say(wire.Started(2), wire.Executed(2, [response(b"2")]))
        assert [data(request) for request in requests] == [[], [b"2"]]
        third = bench.submit()
        await bench.say(wire.Started(1), wire.Started(3), wire.Executed(3, [response(b"3")]))
        await bench.say(wire.Executed(1, [response(b"1")]))
        assert [data(request) for request in (*requests, third)] == [[b"1"], [b"2"], [b"3"]]
        assert not bench.lost

    run(scenario, concurrency=2)


@pytest.mark.parametrize("message", [wire.Executed(1, [response()]), wire.Started(3), wire.Started(0)])
def test_a_batch_ends_only_when_it_was_started_and_only_given_ones_start(message: wire.ToKernel) -> None:
    async def scenario(bench: Bench) -> None:
        requests = [bench.submit() for _ in range(2)]
        await settle()
        await bench.say(message)
        assert "it sent an invalid message" in bench.lost[0]
        assert [responses(request) for request in requests] == [[], []], "neither was started"
        assert bench.model.live.queued == 2

    run(scenario, concurrency=2)


def test_a_lost_worker_with_concurrency_fails_what_it_said_to_have_started_and_gives_the_rest_back() -> None:
    async def scenario(bench: Bench) -> None:
        requests = [bench.submit() for _ in range(2)]
        await bench.say(wire.Started(2))
        bench.worker.die("exit code 1")
        assert [responses(request) for request in requests] == [[], ["WorkerLost"]]
        assert bench.model.live.queued_requests() == [requests[0]]

    run(scenario, concurrency=2)


# ---- sequences ------------------------------------------------------------------------------


def test_a_worker_frees_the_state_of_a_slot() -> None:
    async def scenario(bench: Bench) -> None:
        bench.handle.end_sequence(3)
        assert await bench.received() == [wire.EndSequence(3)]

    run(scenario)


@pytest.mark.parametrize("number", [1, 7])
def test_a_worker_without_sequences_that_reschedules_is_ended(number: int) -> None:
    async def scenario(bench: Bench) -> None:
        request = queued(bench)
        await executing(bench, request)
        await bench.say(wire.Rescheduled(number))
        assert bench.lost

    run(scenario)


@pytest.mark.parametrize("before_queueing", [True, False])
def test_an_error_says_whether_it_comes_before_the_queue(before_queueing: bool) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        failure = wire.ResponseMessage(
            error_code="invalid_arg", error_text="bad", error_before_queueing=before_queueing
        )
        bench.worker.channel.send(wire.Executed(1, [failure]))
        await settle()
        assert isinstance(request.sink, RecordingSink)
        (error,) = request.sink.errors
        assert isinstance(error, InvalidArgument)
        assert (error.message, error.before_queueing) == ("bad", before_queueing)

    run(scenario)


TIMES = wire.StageTimes(10, 20, 40, 70)


class NotedTrace:
    def __init__(self) -> None:
        self.stamped: list[tuple[str, int]] = []

    def stamp(self, name: str, at_ns: int) -> None:
        self.stamped.append((name, at_ns))


def executed(batch: int, *, answered: bool = True) -> wire.Executed:
    return wire.Executed(batch, [response()] if answered else [], 1, 1, 2, 2)


def test_a_report_replaces_the_times_of_the_execution() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await bench.say(
            wire.Reported(1, [wire.RequestReport(1, TIMES)], [wire.BatchReport(1, TIMES)]),
            executed(1),
        )
        assert responses(request) == ["ok"]
        statistics = bench.model.statistics
        assert (statistics.success.count, statistics.execution_count) == (1, 1)
        assert (statistics.input_ns, statistics.infer_ns, statistics.output_ns) == (10, 20, 30)
        assert statistics.batches[1].infer_ns == 20
        bench.submit()
        await bench.say(executed(2))
        assert (statistics.success.count, statistics.infer_ns) == (2, 21)

    run(scenario)


def test_a_request_that_is_reported_after_its_batch_is_counted_anew() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        statistics = bench.model.statistics
        await bench.say(executed(1, answered=False))
        assert (statistics.success.count, statistics.infer_ns) == (1, 1)
        await bench.say(
            wire.Reported(0, [wire.RequestReport(1, TIMES)], responses=[wire.ResponseReport(0, "success", 10, 20, 30)]),
            wire.Responded(1, True, response()),
        )
        assert responses(request) == ["ok"]
        assert (statistics.success.count, statistics.infer_ns) == (1, 20)
        assert statistics.responses["0"].success.count == 1
        await bench.say(wire.Reported(0, [wire.RequestReport(1, TIMES, False)]))  # too late
        assert statistics.fail.count == 0

    run(scenario, decoupled=True)


def test_activities_go_to_the_trace_of_their_request() -> None:
    async def scenario(bench: Bench) -> None:
        request, trace = bench.submit(), NotedTrace()
        request.trace = trace  # type: ignore[assignment]  # only `stamp` is used
        other = wire.Activity(9, "LOST", 1)
        await bench.say(wire.Reported(1, activities=[wire.Activity(1, "LOOKUP_START", 5), other]), executed(1))
        assert trace.stamped == [("LOOKUP_START", 5 + bench.session.clock_offset_ns)]

    run(scenario)


def test_the_memory_of_a_worker_is_known_until_it_ends() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.say(wire.MemoryUsed([wire.MemoryUse("GPU", 0, 64)]))
        memory = bench.model.statistics.memory
        assert memory.by_instance == {"m_0": (MemoryUsage("GPU", 0, 64),)}
        bench.worker.kill()
        assert memory.by_instance == {}
        assert memory.pids == {}

    run(scenario)


def test_a_report_that_no_worker_of_ours_sends_ends_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        bench.submit()
        await bench.say(wire.Reported(1, [wire.RequestReport(1, wire.StageTimes(4, 3, 2, 1))]))
        assert bench.lost

    run(scenario)


class AwaitedSink(RecordingSink):
    """Says when a response has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    def send(self, response: Response) -> None:
        super().send(response)
        self.came.set()


def test_responses_of_a_stream_are_taken_from_the_outbox_of_a_worker_that_computes() -> None:
    async def scenario(bench: Bench) -> None:
        bench.worker.channel.share_outbox()
        sink = AwaitedSink()
        request = Request("m", [Tensor("IN", "FP32", [1], bytes(4))], sink)
        bench.model.submit(request)
        await bench.received()
        await bench.say(wire.Responded(1, False, response(b"1")))
        for number in (b"2", b"3"):
            sink.came.clear()
            bench.worker.channel.send_later(wire.Responded(1, False, response(number)))
            await sink.came.wait()
        await bench.say(wire.Responded(1, True), wire.Executed(1))
        assert data(request) == [b"1", b"2", b"3"], "nothing comes twice"

    run(scenario, decoupled=True)
