"""Tensors of requests in shared memory: regions that the worker knows, outputs that keep their place, held inputs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from backends.supervision.worker_memory import WorkerMemory
from backends.transport import wire
from kernel.errors import ServerStopping
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from shm.arena import Arena
from shm.tensor import Tensor
from tests.backends.supervision.played_worker import (
    Bench,
    input_part,
    output_block,
    request_with_large_input,
    response,
    responses,
    run,
    settle,
)


def test_a_worker_knows_a_region_before_a_message_names_it_and_writes_only_to_its_models_inputs() -> None:
    async def scenario(bench: Bench) -> None:
        request_with_large_input(bench)
        await bench.say(wire.Executed(1, [response()]))
        arena = bench.model.input_arena
        assert arena is not None
        with Arena("outputs of another worker", 1 << 16) as other:
            block = other.take(8192)
            assert block is not None
            passed_on = Request("m", [Tensor("IN", "UINT8", [8192], span=block.span)], RecordingSink(), leased=True)
            bench.model.submit(passed_on)
            attach_own, execute, attach_other, execute_next = await bench.received()
            assert attach_own == wire.Attach(arena.region.number, 1 << 20, 0, True, False)
            assert isinstance(execute, wire.Execute)
            assert attach_other == wire.Attach(other.region.number, 1 << 16, 0, False, False)
            assert isinstance(execute_next, wire.Execute)
            [tensor] = execute_next.requests[0].inputs
            assert tensor.span is not None
            assert (tensor.span.lease.region_number, tensor.span.offset, tensor.span.byte_size) == (
                other.region.number, block.offset, 8192,
            )  # fmt: skip
            await bench.say(wire.Executed(2, [response()]))
            assert other.allocator.block_count == 0

    run(scenario)


def mappings(arena: Arena) -> int:
    """Return how often this process has mapped an arena."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    inode = os.fstat(arena.region.fd).st_ino
    return sum(line.split()[4] == str(inode) and "memfd" in line for line in maps)


def test_the_output_of_one_worker_is_the_input_of_another_and_the_kernel_has_no_byte_of_it() -> None:
    async def scenario(producer: Bench) -> None:
        consumer = Bench()
        await consumer.start()
        with Arena("outputs", 1 << 16) as arena:  # in a server it is in the worker's process
            block = arena.take(8192)
            assert block is not None
            block.view()[:] = b"x" * 8192
            request = producer.submit()
            await producer.received()
            producer.worker.channel.send_with_fd(wire.ArenaCreated(1 << 16), arena.region.fd)
            await producer.say(wire.Executed(1, [wire.ResponseMessage([output_block("OUT", block.offset, 8192)])]))
            assert isinstance(request.sink, RecordingSink)
            [result] = request.sink.responses
            assert result.leased
            assert result.outputs is not None
            [output] = result.outputs
            assert output.span is not None
            place = output.span.shared()
            result.release()

            following = Request("m", [Tensor("IN", "UINT8", [8192], span=place)], RecordingSink(), leased=True)
            consumer.model.submit(following)
            attach, execute = await consumer.received()
            number = place.lease.region_number
            assert attach == wire.Attach(number, 1 << 16, 0, False, False)
            assert isinstance(execute, wire.Execute)
            [tensor] = execute.requests[0].inputs
            assert tensor.data is None
            assert tensor.span is not None
            assert (tensor.span.lease.region_number, tensor.span.offset) == (number, block.offset)
            fd = consumer.worker.channel.take_fd()
            assert os.pread(fd, 8192, block.offset) == b"x" * 8192
            os.close(fd)
            assert mappings(arena) == 1, "that of the producer alone"

            assert await producer.received() == [], "the block is in use"
            await consumer.say(wire.Executed(1, [response()]))
            assert await producer.received() == [wire.FreeBlocks([block.offset])]
            block.release()
        consumer.model.close(ServerStopping(""))
        consumer.worker.kill()

    run(scenario)


def test_a_consumer_keeps_the_block_of_a_producer_that_is_gone() -> None:
    async def scenario(producer: Bench) -> None:
        consumer = Bench()
        await consumer.start()
        request = producer.submit()
        await producer.received()
        with Arena("outputs", 1 << 16) as arena:
            producer.worker.channel.send_with_fd(wire.ArenaCreated(1 << 16), arena.region.fd)
        await producer.say(wire.Executed(1, [wire.ResponseMessage([output_block("OUT", 0, 8192)])]))
        assert isinstance(request.sink, RecordingSink)
        [result] = request.sink.responses
        assert result.outputs is not None
        [output] = result.outputs
        following = Request("m", [Tensor("IN", "UINT8", [8192], span=output.span)], RecordingSink(), leased=True)
        consumer.model.submit(following)
        producer.worker.die("exit code 1")
        assert bytes(output.raw()) == bytes(8192)
        attach, _ = await consumer.received()
        assert isinstance(attach, wire.Attach)
        await consumer.say(wire.Executed(1, [response()]))
        assert output.span is not None
        assert output.span.lease.region.closed
        assert await consumer.received() == [wire.Detach(attach.number)]
        consumer.model.close(ServerStopping(""))
        consumer.worker.kill()

    run(scenario)


def test_a_response_that_is_refused_keeps_no_block_of_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        bench.submit()
        await settle()
        with Arena("outputs", 1 << 16) as arena:
            bench.worker.channel.send_with_fd(wire.ArenaCreated(1 << 16), arena.region.fd)
        await settle()
        assert isinstance(bench.handle.memory, WorkerMemory)
        outputs = bench.handle.memory.output_arena
        assert outputs is not None
        wrong = wire.ResponseMessage([output_block("A", 0, 4096), output_block("B", 1 << 16, 4096)])
        await bench.say(wire.Executed(1, [wrong]))
        assert bench.lost
        assert outputs.leased_block_count == 0
        assert outputs.region.closed

    run(scenario)


# ---- inputs that a model keeps, or returns --------------------------------------------------


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


def test_without_a_descriptor_for_a_region_its_request_fails_and_the_instance_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(fd: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario(bench: Bench) -> None:
        with Arena("outputs of another worker", 1 << 16) as other, monkeypatch.context() as patch:
            patch.setattr("backends.supervision.worker_memory.read_only_fd", fail)
            block = other.take(8192)
            assert block is not None
            tensor = Tensor("IN", "UINT8", [8192], span=block.span)
            refused = Request("m", [tensor], RecordingSink(), leased=True)
            bench.model.submit(refused)
            assert responses(refused) == ["NoDescriptorLeft"]
            assert other.allocator.block_count == 0, "its leases have ended"
            [execute] = await bench.received()
            assert isinstance(execute, wire.Execute)
            assert execute.requests == []
            await bench.say(wire.Executed(1, []))
            patch.undo()

            block = other.take(8192)
            assert block is not None
            following = Request("m", [Tensor("IN", "UINT8", [8192], span=block.span)], RecordingSink(), leased=True)
            bench.model.submit(following)
            attach, execute = await bench.received()
            assert attach == wire.Attach(other.region.number, 1 << 16, 0, False, False), "it was not known before"
            assert isinstance(execute, wire.Execute)
            await bench.say(wire.Executed(2, [response()]))
            assert responses(following) == ["ok"]

    run(scenario)
