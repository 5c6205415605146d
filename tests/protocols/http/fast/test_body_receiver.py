from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import ArenaFull
from protocols.http.fast.call import FastCall, IncomingBody, incoming_body
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.infer_call import HttpInference
from protocols.http.inference.prepared import InferRequestHead

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], object]], None]


def call(kernel: Kernel, body_byte_size: int, header_length: int) -> FastCall:
    model = kernel.route("echo")
    head = InferRequestHead(model, "echo", "", "/", body_byte_size, header_length, IDENTITY)
    return FastCall(HttpInference(kernel, 1 << 20), head, None)


def test_parts_become_one_body(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        data = bytes(range(251)) * 200
        incoming = incoming_body(call(kernel, len(data), 0))
        assert incoming.is_small
        for position in range(0, len(data), 999):
            incoming.add(data[position : position + 999])
        assert bytes(incoming.body) == data

    with_kernel(test)


def test_a_body_for_which_its_model_has_no_memory_left_is_received_for_a_helper(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        model = kernel.resolve("echo")
        small = kernel.memory_for(kernel.route("echo"), 1)
        assert model.input_arena is not None
        size = model.input_arena.allocator.capacity // 4 + 1  # blocks are powers of two: one takes half
        small.release()
        first, second = (incoming_body(call(kernel, size, 0)) for _ in range(2))
        assert [each.receive_buffer and each.receive_buffer.of_model for each in (first, second)] == [True, False]
        assert model.input_arena.allocator.block_count == 1
        first.release()
        second.release()
        assert kernel.memory_for_helper(1).byte_size == 1

    with_kernel(test)


def test_a_body_without_memory_is_read_and_forgotten(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        incoming = incoming_body(call(kernel, 2_000_000_000, 0))
        assert isinstance(incoming.refusal, ArenaFull)
        incoming.add(bytes(1000))
        room = incoming.room()
        assert 0 < len(room) <= 1 << 20
        assert incoming.received == 1000
        incoming.start_call()
        assert incoming.call.response is not None
        assert incoming.call.response.status == 503

    with_kernel(test)


def test_a_body_with_a_receive_buffer_is_received_there(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        model = kernel.resolve("echo")
        data = bytes(range(256)) * 1_000
        buffer = kernel.receive_buffer(kernel.route("echo"), len(data), 100)
        assert buffer is not None
        incoming = IncomingBody(call(kernel, len(data), 100), len(data), buffer)
        incoming.add(data[:1000])
        room = incoming.room()
        assert room is not None
        room[:] = data[1000:]
        incoming.received += len(room)
        assert bytes(incoming.body) == data
        span = buffer.span(buffer.view[100:8000])
        assert span is not None
        assert span.offset % 64 == 0, "the first tensor is aligned"
        assert buffer.span(memoryview(bytearray(data))) is None, "not a part of it"
        assert model.input_arena is not None
        incoming.release()
        assert model.input_arena.allocator.block_count == 1
        span.lease.release()
        assert model.input_arena.allocator.block_count == 0

    with_kernel(test)
