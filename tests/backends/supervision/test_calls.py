"""Calls that a worker makes: what it may name, what it gets, and what stays leased. The worker is played."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from backends.transport import wire
from kernel.errors import InternalError, NotFound
from kernel.serving.response import Response
from shm.arena import Arena
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor
from tests.backends.supervision.call_bench import SMALL, CallBench, calling, submit
from tests.backends.supervision.played_worker import (
    input_part,
    request_with_large_input,
    response,
    settle,
)

if TYPE_CHECKING:
    from kernel.serving.request import Request


def in_own_arena(offset: int = 0, byte_size: int = 8192) -> Tensor:
    return Tensor("IN", "UINT8", [byte_size], None, Span(RegionNumber(wire.OUTPUT_ARENA), offset, byte_size))


def test_a_call_has_the_fields_of_the_message_and_the_request_as_its_parent() -> None:
    async def scenario(bench: CallBench) -> None:
        request = bench.submit()
        await bench.say(submit(1, SMALL, blocking=True))
        (call,) = bench.calls.calls
        assert (call.model_name, call.model_version, call.id, call.parent) == ("other", "2", "id", request)
        assert (call.sequence_start, call.sequence_end, call.correlation_id) == (True, True, 7)
        assert (call.timeout_us, call.parameters, [o.name for o in call.outputs]) == (9, {"a": 1}, ["OUT"])
        (execution,) = bench.calls.executions
        assert execution is not None
        assert (execution.instance, execution.batch, execution.blocking) == (bench.handle, 1, True)
        await bench.received()
        call.respond(Response("other", "2", "", [Tensor("OUT", "UINT8", [1], b"x")], {"p": 2.5}))
        (got,) = await bench.received()
        assert got == wire.CallResponded(1, True, wire.ResponseMessage([Tensor("OUT", "UINT8", [1], b"x")], {"p": 2.5}))
        assert bench.calls.ended_calls == [call]
        await bench.say(wire.Executed(1, [response()]))

    calling(scenario)


def test_the_last_open_call_has_its_response_at_once_and_others_share_a_send() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        await bench.say(submit(1, SMALL), submit(2, SMALL))
        await bench.received()
        for call, expected in zip(bench.calls.calls, (0, 2), strict=True):
            call.respond(Response("other", "2", "", [Tensor("OUT", "UINT8", [1], b"x")]))
            assert len(bench.received_now()) == expected
        await bench.say(wire.Executed(1, [response()]))

    calling(scenario)


def test_the_trace_of_a_call_is_that_of_the_request_that_the_model_names() -> None:
    async def scenario(bench: CallBench) -> None:
        first = bench.submit()
        await bench.say(submit(1, SMALL), submit(2, SMALL, trace_parent=1), submit(3, SMALL, trace_parent=17))
        assert [call.parent for call in bench.calls.calls] == [first] * 3
        assert [call.trace_parent for call in bench.calls.calls] == [None, first, None]

    calling(scenario)


def test_a_call_without_a_living_request_has_no_parent() -> None:
    async def scenario(bench: CallBench) -> None:
        await bench.say(submit(1, SMALL, parents=(17,)), submit(2, SMALL, parents=()))
        assert [call.parent for call in bench.calls.calls] == [None, None]
        assert bench.calls.executions == [None, None]

    calling(scenario)


def test_a_refused_call_and_one_that_fails_have_the_error_as_their_response() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        await bench.received()
        bench.calls.refusal = NotFound("not there")
        await bench.say(submit(1, SMALL))
        bench.calls.refusal = None
        await bench.say(submit(2, SMALL))
        bench.calls.calls[0].fail(InternalError("broken"))
        first, second = await bench.received()
        assert isinstance(first, wire.CallResponded)
        assert isinstance(second, wire.CallResponded)
        assert first.response == wire.ResponseMessage(error_code="not_found", error_text="not there")
        assert second.response == wire.ResponseMessage(error_code="internal", error_text="broken")
        assert first.final
        assert second.final
        await bench.say(wire.Executed(1, [response()]))

    calling(scenario)


def test_an_input_of_the_caller_is_leased_for_the_call_where_it_lies() -> None:
    async def scenario(bench: CallBench) -> None:
        request = request_with_large_input(bench)
        part = input_part(request, "IN", 4096, 100)
        await bench.say(submit(1, part), wire.Executed(1, [response()]))
        (call,) = bench.calls.calls
        (tensor,) = call.inputs
        assert tensor.span is not None
        arena = bench.model.input_arena
        assert arena is not None
        assert tensor.span.lease.region is arena.region
        assert arena.allocator.block_count == 1, "the call holds the block after the caller's request"
        call.respond(Response("other", "2", "", []))
        assert arena.allocator.block_count == 0

    calling(scenario)


def test_an_input_in_the_callers_arena_is_freed_when_the_call_has_ended() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        with Arena("outputs of the caller", 1 << 16) as arena:
            bench.worker.channel.send_with_fd(wire.ArenaCreated(1 << 16), arena.region.fd)
            await bench.say(submit(1, in_own_arena(4096)))
            await bench.received()
            bench.calls.calls[0].respond(Response("other", "2", "", []))
            messages = await bench.received()
            assert wire.FreeBlocks([4096]) in messages
            await bench.say(wire.Executed(1, [response()]))

    calling(scenario)


def test_results_stay_leased_until_the_worker_releases_them_and_can_be_inputs() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        with Arena("outputs of the called model", 1 << 16) as arena:
            await bench.say(submit(1, SMALL))
            await bench.received()
            blocks = [arena.take(8192), arena.take(8192)]
            tensors = [Tensor(name, "UINT8", [8192], span=b.span) for name, b in zip("AB", blocks, strict=True) if b]
            bench.calls.calls[0].respond(Response("other", "2", "", tensors, leased=True))
            attach, got = await bench.received()
            assert attach == wire.Attach(arena.region.number, 1 << 16, 0, False, False)
            assert isinstance(got, wire.CallResponded)
            assert got.lease == 1
            await bench.say(wire.Released([1]))
            assert arena.allocator.block_count == 1
            second = tensors[1].span
            assert second is not None
            named = Span(RegionNumber(arena.region.number), second.offset + 8, 16)
            await bench.say(submit(2, Tensor("IN", "UINT8", [16], None, named)), wire.Released([2]))
            assert arena.allocator.block_count == 1, "the second call holds it"
            bench.calls.calls[1].respond(Response("other", "2", "", []))
            assert arena.allocator.block_count == 0
            await bench.say(wire.Executed(1, [response()]))

    calling(scenario)


def test_a_model_that_keeps_too_much_gets_an_error_and_then_results_again() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        with Arena("outputs of the called model", 1 << 20) as arena:

            async def called(number: int, byte_size: int) -> wire.CallResponded:
                await bench.say(submit(number, SMALL))
                block = arena.take(byte_size)
                assert block is not None
                tensor = Tensor("OUT", "UINT8", [byte_size], span=block.span)
                bench.calls.calls[-1].respond(Response("other", "2", "", [tensor], leased=True))
                found = (await bench.received())[-1]
                assert isinstance(found, wire.CallResponded)
                assert found.response is not None
                return found

            assert (await called(1, 20_000)).lease
            refused = await called(2, 20_000)
            assert refused.response is not None
            assert refused.response.error_text == (
                "the model keeps 20000 bytes of results of its calls; with another 20000 bytes these are more than "
                "32768, which is the limit of a worker"
            )
            assert arena.allocator.block_count == 1
            await bench.say(wire.Released([1]))
            assert (await called(3, 20_000)).lease
            await bench.say(wire.Released([2]), wire.Executed(1, [response()]))
            assert arena.allocator.block_count == 0

    calling(scenario)


def test_a_worker_that_dies_leaves_no_call_and_no_result() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        with Arena("outputs of the called model", 1 << 16) as arena:
            await bench.say(submit(1, SMALL), submit(2, SMALL))
            first, second = bench.calls.calls

            def result() -> Response:
                block = arena.take(8192)
                assert block is not None
                return Response("other", "2", "", [Tensor("OUT", "UINT8", [8192], span=block.span)], leased=True)

            first.respond(result())
            await settle()
            bench.worker.die("exit code 1")
            assert second.cancelled
            second.respond(result())
            assert arena.allocator.block_count == 0
            assert bench.calls.ended_calls == [first, second]

    calling(scenario)


def test_a_call_is_cancelled_by_the_worker_or_with_all_of_its_parents() -> None:
    async def scenario(bench: CallBench) -> None:
        request = bench.submit()
        await bench.say(submit(1, SMALL), submit(2, SMALL), wire.CancelCall(1), wire.CancelCall(17))
        first, second = bench.calls.calls
        assert (first.cancelled, second.cancelled) == (True, False)
        request.cancel()
        assert second.cancelled
        await bench.say(wire.Executed(1, [response()]))

    calling(scenario)


def test_credit_of_a_stream_goes_to_the_called_model() -> None:
    class Owner:
        count = 0

        def responded(self, request: Request, response: Response) -> None: ...

        def consumed(self, request: Request, count: int) -> None:
            self.count += count

        def cancelled(self, request: Request) -> None: ...

    async def scenario(bench: CallBench) -> None:
        bench.submit()
        await bench.say(submit(1, SMALL, streaming=True))
        owner = bench.calls.calls[0].owner = Owner()
        await bench.say(wire.CallConsumed(1, 16))
        assert owner.count == 16
        await bench.received()
        bench.calls.calls[0].respond(Response("other", "2", "", final=True))
        assert await bench.received() == [wire.CallResponded(1, True)]
        await bench.say(wire.CallConsumed(1, 16), wire.Executed(1, [response()]))
        assert owner.count == 16

    calling(scenario)


def test_what_was_dispatched_ahead_of_time_comes_back_when_the_model_calls() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.model.instances._depth = 4
        requests = [bench.submit() for _ in range(4)]
        await bench.received()
        await bench.say(submit(1, SMALL))
        assert wire.Recall() in await bench.received()
        await bench.say(wire.Recalled([2, 3, 4]))
        assert [request.dispatched for request in requests] == [True, False, False, False]
        assert bench.calls.requeued_calls == requests[1:]
        bench.model.check()
        await bench.say(wire.Executed(1, [response()]))
        executes = [message for message in await bench.received() if isinstance(message, wire.Execute)]
        assert [execute.batch for execute in executes] == [5, 6], "at most one ahead of time from now on"
        await bench.say(*(wire.Executed(number, [response()]) for number in (5, 6, 7)))

    calling(scenario)


def test_a_cancelled_request_that_waits_behind_a_call_comes_back() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        await bench.say(submit(1, SMALL), wire.Executed(1, [response()]))
        bench.submit()
        ahead = bench.submit()
        assert ahead.dispatched
        await bench.say(submit(2, SMALL))
        await bench.received()
        ahead.cancel()
        assert wire.Recall() in await bench.received()
        await bench.say(wire.Recalled([3]))
        assert ahead.finished
        await bench.say(wire.Executed(2, [response()]))
        bench.model.check()

    calling(scenario)


@pytest.mark.parametrize(
    "messages",
    [
        [submit(1, SMALL), submit(1, SMALL)],
        [submit(1, Tensor("IN", "UINT8", [4]))],
        [submit(1, in_own_arena())],
        [submit(1, Tensor("IN", "UINT8", [4], None, Span(RegionNumber(999), 0, 4)))],
        [submit(1, SMALL), wire.Released([1])],
        [wire.Recalled([1])],
    ],
    ids=["number twice", "no bytes", "no arena", "unknown region", "unknown result", "batch that is executed"],
)
def test_what_no_worker_of_ours_sends_ends_the_worker(messages: list[wire.ToKernel]) -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        await bench.say(*messages)
        (cause,) = bench.lost
        assert "invalid message" in cause

    calling(scenario)


def test_a_stream_ends_with_the_last_request_that_it_was_made_for_and_a_call_for_one_response_does_not() -> None:
    async def scenario(bench: CallBench) -> None:
        bench.submit()
        await bench.say(submit(1, SMALL, streaming=True), submit(2, SMALL))
        stream, single = bench.calls.calls
        await bench.say(wire.Executed(1, [response()]))
        assert (stream.cancelled, single.cancelled) == (True, False)

    calling(scenario)
