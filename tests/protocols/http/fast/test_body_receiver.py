from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.http.fast.body_receiver import IncomingBody
from protocols.http.fast.call import FastCall
from protocols.http.inference.call import HttpInference
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.head import InferRequestHead

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], object]], None]


def call(kernel: Kernel, body_byte_size: int, header_length: int) -> FastCall:
    model = kernel.resolve("echo")
    head = InferRequestHead(model, "echo", "", "/", body_byte_size, header_length, IDENTITY)
    return FastCall(HttpInference(kernel, 1 << 20), head, None)


def test_parts_become_one_body_and_memory_follows_what_has_come(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        data = bytes(range(251)) * 4_000
        incoming = IncomingBody(call(kernel, len(data), 0), len(data))
        assert len(incoming.body) == 0
        for position in range(0, len(data), 999):
            incoming.add(data[position : position + 999])
            assert len(incoming.body) <= max(64 << 10, 8 * incoming.received)
        assert bytes(incoming.body) == data

    with_kernel(test)


def test_a_body_with_a_receive_buffer_is_received_there(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        model = kernel.resolve("echo")
        data = bytes(range(256)) * 1_000
        buffer = kernel.receive_buffer(model, len(data), 100)
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
