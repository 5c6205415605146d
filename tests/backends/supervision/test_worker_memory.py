"""Memory that a worker shares with the kernel is given back once, and never looked at outside of what it may be."""

from __future__ import annotations

import pytest

from backends.transport import wire
from kernel.testing import RecordingSink
from tests.backends.supervision.played_worker import Bench, input_part, request_with_large_input, responses, run, settle


def test_inputs_that_the_model_keeps_are_not_free_until_it_lets_them_go() -> None:
    async def scenario(bench: Bench) -> None:
        requests = [request_with_large_input(bench) for _ in range(2)]
        assert bench.model.input_arena is not None
        blocks = bench.model.input_arena.allocator
        await settle()
        bench.worker.channel.send(wire.InputsHeld([1]))
        bench.worker.channel.send(wire.Executed(1, [wire.ResponseMessage()]))
        await settle()
        assert [responses(request) for request in requests] == [["ok"], []]
        assert blocks.block_count == 2
        bench.worker.channel.send(wire.InputsFreed([1]))
        await settle()
        assert blocks.block_count == 1
        bench.worker.channel.send(wire.InputsHeld([2]))
        bench.worker.channel.send(wire.Executed(2, [wire.ResponseMessage()]))
        await settle()
        assert responses(requests[1]) == ["ok"]
        assert blocks.block_count == 1
        bench.worker.die("exit code 1")
        assert blocks.block_count == 0

    run(scenario)


def test_inputs_that_are_outputs_are_free_when_the_response_was_sent() -> None:
    async def scenario(bench: Bench) -> None:
        request = request_with_large_input(bench)
        await settle()
        parts = [input_part(request, "A", 0, 8192), input_part(request, "B", 4096, 4096)]
        bench.worker.channel.send(wire.Executed(1, [wire.ResponseMessage(parts)]))
        await settle()
        assert isinstance(request.sink, RecordingSink)
        (response,) = request.sink.responses
        assert [bytes(output.raw()) for output in response.outputs or ()] == [b"\1" * 8192, b"\1" * 4096]
        assert bench.model.input_arena is not None
        assert bench.model.input_arena.allocator.block_count == 1
        response.release()
        assert bench.model.input_arena.allocator.block_count == 0

    run(scenario)


@pytest.mark.parametrize(("offset", "byte_size"), [(-4096, 4096), (4096, 8192), (0, 8193), (0, -1)])
def test_an_output_outside_of_the_requests_inputs_ends_the_worker(offset: int, byte_size: int) -> None:
    async def scenario(bench: Bench) -> None:
        request = request_with_large_input(bench)
        await settle()
        part = input_part(request, "A", offset, byte_size)
        bench.worker.channel.send(wire.Executed(1, [wire.ResponseMessage([part])]))
        await settle()
        assert responses(request) == ["WorkerLost"]

    run(scenario)


def test_an_input_that_is_an_output_before_the_last_ends_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        request = request_with_large_input(bench)
        await settle()
        bench.worker.channel.send(wire.Responded(1, False, wire.ResponseMessage([input_part(request, "A", 0, 8192)])))
        await settle()
        assert responses(request) == ["WorkerLost"]

    run(scenario)
