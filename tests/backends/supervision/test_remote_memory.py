"""A worker without shared memory: tensors are copied both ways, and nothing changes its order."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from backends.supervision.remote_memory import RemoteMemory
from backends.transport import wire
from kernel.errors import InvalidArgument
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from shm.arena import Arena
from shm.lease import RegionNumber
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import RequestedOutput, Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from shm.tensor import Buffer

LARGE = bytes(range(256)) * 2000


class FakeSession:
    """A connection that takes everything at once."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: wire.ToWorker) -> None:
        if isinstance(message, wire.Chunk):
            message = wire.Chunk(message.number, message.offset, bytes(message.data))
        self.sent.append(message)

    async def written(self, byte_size: int) -> None:
        await asyncio.sleep(0)


class FakeHelper:
    """Reads when the test says so, and writes to a dictionary."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.allowed = asyncio.Event()
        self.error: InvalidArgument | None = None
        self.written: list[tuple[bytes, int]] = []

    async def read(self, span: Span) -> Span:
        await self.allowed.wait()
        if self.error is not None:
            raise self.error
        block = self.arena.take(span.byte_size)
        assert block is not None
        block.view()[:] = LARGE[: span.byte_size]
        return block.span

    async def write(self, data: Buffer, target: Span) -> None:
        await self.allowed.wait()
        if self.error is not None:
            raise self.error
        self.written.append((bytes(data), target.offset))


class Lab:
    def __init__(self) -> None:
        self.arena = Arena("inputs", 1 << 22)
        self.client = Region("r", RegionKind.SYSTEM, FileHandle(os.memfd_create("r")), 1 << 20)
        self.session = FakeSession()
        self.helper = FakeHelper(Arena("helper", 1 << 22))
        self.not_sent: list[tuple[int, int, str]] = []
        self.memory = RemoteMemory(
            self.session,  # type: ignore[arg-type]
            self.helper,
            1 << 20,
            lambda batch, request, error: self.not_sent.append((batch, request, error.message)),
        )

    def in_arena(self, byte_size: int = len(LARGE)) -> Tensor:
        block = self.arena.take(byte_size)
        assert block is not None
        block.view()[:] = LARGE[:byte_size]
        return Tensor("IN", "UINT8", [byte_size], None, block.span)

    def of_client(self) -> Tensor:
        return Tensor("IN", "UINT8", [5000], None, Span(self.client.lease(), 0, 5000))

    def batches(self) -> list[int]:
        return [message.batch for message in self.session.sent if isinstance(message, wire.Execute)]

    def received(self, number: int) -> bytes:
        """What the worker has of a region that was sent."""
        return b"".join(m.data for m in self.session.sent if isinstance(m, wire.Chunk) and m.number == number)


def run(scenario: Callable[[Lab], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await scenario(Lab())

    asyncio.run(main())


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def execute(batch: int, *tensors: Tensor) -> wire.Execute:
    return wire.Execute(batch, [wire.RequestMessage(10 * batch + i, [tensor]) for i, tensor in enumerate(tensors)])


def test_an_input_is_sent_in_chunks_and_freed_with_its_request() -> None:
    async def scenario(lab: Lab) -> None:
        lab.memory.send_execute(execute(1, lab.in_arena()))
        await settle()
        sent = lab.session.sent[-1].requests[0].inputs[0]
        number = sent.span.lease.region_number
        assert (sent.span.offset, sent.span.byte_size) == (0, len(LARGE))
        assert lab.received(number) == LARGE
        assert lab.session.sent[0] == wire.Transfer(number, len(LARGE))
        lab.memory.finished(10)
        assert lab.session.sent[-1] == wire.Detach(number)
        lab.memory.finished(10)
        assert lab.session.sent.count(wire.Detach(number)) == 1

    run(scenario)


def test_small_inputs_are_sent_with_their_batch_at_once() -> None:
    async def scenario(lab: Lab) -> None:
        message = execute(1, lab.in_arena(5000), lab.in_arena(6000), Tensor("IN", "UINT8", [1], b"x"))
        lab.memory.send_execute(message)
        [sent] = lab.session.sent
        inputs = [request.inputs[0] for request in sent.requests]
        assert [bytes(each.raw()) for each in inputs] == [LARGE[:5000], LARGE[:6000], b"x"]
        assert [each.span for each in inputs] == [None, None, None]
        assert message.requests[0].inputs[0].span is not None, "the kernel's tensors stay where they are"
        assert lab.memory.last_sent == 1

    run(scenario)


@pytest.mark.parametrize(
    "byte_sizes", [[wire.SENT_INLINE_BYTE_SIZE + 1], [wire.SENT_INLINE_BYTE_SIZE] * 9], ids=["input", "batch"]
)
def test_larger_inputs_and_batches_are_sent_in_chunks(byte_sizes: list[int]) -> None:
    async def scenario(lab: Lab) -> None:
        lab.memory.send_execute(execute(1, *map(lab.in_arena, byte_sizes)))
        assert lab.session.sent == []
        await settle()
        spans = [request.inputs[0].span for request in lab.session.sent[-1].requests]
        assert [lab.received(span.lease.region_number) for span in spans] == [LARGE[:size] for size in byte_sizes]

    run(scenario)


def test_a_small_batch_waits_for_one_that_is_being_sent() -> None:
    async def scenario(lab: Lab) -> None:
        lab.memory.send_execute(execute(1, lab.in_arena()))
        lab.memory.send_execute(execute(2, lab.in_arena(5000)))
        await settle()
        assert lab.batches() == [1, 2]

    run(scenario)


def test_batches_keep_their_order_while_a_client_s_region_is_read() -> None:
    async def scenario(lab: Lab) -> None:
        lab.memory.send_execute(execute(1, lab.of_client()))
        lab.memory.send_execute(execute(2, Tensor("IN", "UINT8", [1], b"x")))
        await settle()
        assert lab.batches() == []
        lab.helper.allowed.set()
        await settle()
        assert lab.batches() == [1, 2]
        assert lab.helper.arena.allocator.block_count == 0, "the helper's copy is not needed any more"

    run(scenario)


def test_a_region_that_cannot_be_read_fails_its_own_request_only() -> None:
    async def scenario(lab: Lab) -> None:
        lab.helper.error = InvalidArgument("truncated")
        lab.helper.allowed.set()
        lab.memory.send_execute(execute(1, lab.in_arena(), lab.of_client()))
        await settle()
        assert lab.not_sent == [(1, 11, "truncated")]
        assert [request.number for request in lab.session.sent[-1].requests] == [10]

    run(scenario)


def test_an_output_is_put_together_from_its_chunks() -> None:
    async def scenario(lab: Lab) -> None:
        request = Request("m", [], RecordingSink())
        lab.memory.begin_transfer(1 << 62, 10)
        lab.memory.add_chunk(1 << 62, 6, b"6789")
        lab.memory.add_chunk(1 << 62, 0, b"012345")
        tensor = Tensor("OUT", "UINT8", [10])
        lab.memory.take_output(request, tensor, Span(RegionNumber(1 << 62), 0, 10), final=True)
        assert tensor.span is None
        assert bytes(tensor.raw()) == b"0123456789"
        with pytest.raises(ValueError, match="which was not sent"):
            lab.memory.take_output(request, tensor, Span(RegionNumber(1 << 62), 0, 10), final=True)

    run(scenario)


@pytest.mark.parametrize(("number", "byte_size"), [(5, 1), (6, -1), (6, 1 << 21)])
def test_a_transfer_that_no_worker_of_ours_begins_is_refused(number: int, byte_size: int) -> None:
    async def scenario(lab: Lab) -> None:
        lab.memory.begin_transfer(5, 100)
        with pytest.raises(ValueError, match="a transfer of"):
            lab.memory.begin_transfer(number, byte_size)

    run(scenario)


@pytest.mark.parametrize(("number", "offset"), [(5, 97), (5, -1), (6, 0)])
def test_a_chunk_outside_of_its_region_is_refused(number: int, offset: int) -> None:
    async def scenario(lab: Lab) -> None:
        lab.memory.begin_transfer(5, 100)
        with pytest.raises(ValueError, match="4 bytes at"):
            lab.memory.add_chunk(number, offset, b"abcd")

    run(scenario)


def test_an_output_is_in_the_client_s_region_before_the_client_gets_the_response() -> None:
    async def scenario(lab: Lab) -> None:
        sink = RecordingSink()
        wanted = RequestedOutput("OUT", 0, Span(lab.client.lease(), 64, 100))
        request = Request("m", [], sink, outputs=[wanted])
        first = Response("m", "1", "", [Tensor("OUT", "UINT8", [3], b"abc")], final=False)
        lab.memory.deliver(request, first)
        lab.memory.deliver(request, Response("m", "1", ""))
        await settle()
        assert sink.responses == []
        lab.helper.allowed.set()
        await settle()
        assert lab.helper.written == [(b"abc", 64)]
        assert [response.final for response in sink.responses] == [False, True]
        (output,) = sink.responses[0].outputs or []
        assert output.response_bytes() is None
        sink.responses[0].release()
        wanted.span.lease.release()  # type: ignore[union-attr]
        assert lab.client.lease_count == 0

    run(scenario)


def test_a_client_s_region_that_cannot_be_written_is_the_response_s_error() -> None:
    async def scenario(lab: Lab) -> None:
        lab.helper.error = InvalidArgument("truncated")
        lab.helper.allowed.set()
        sink = RecordingSink()
        request = Request("m", [], sink, outputs=[RequestedOutput("OUT", 0, Span(lab.client.lease(), 64, 100))])
        lab.memory.deliver(request, Response("m", "1", "", [Tensor("OUT", "UINT8", [3], b"abc")]))
        await settle()
        assert [error.message for error in sink.errors] == ["truncated"]

    run(scenario)


def test_the_end_of_the_worker_ends_what_is_still_to_be_sent() -> None:
    async def scenario(lab: Lab) -> None:
        lab.memory.send_execute(execute(1, lab.of_client()))
        await settle()
        lab.memory.close()
        lab.helper.allowed.set()
        await settle()
        assert lab.batches() == []
        assert lab.not_sent == []

    run(scenario)
