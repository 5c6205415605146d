from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.http.compression import IDENTITY
from protocols.http.fast.body_receiver import Upload
from protocols.http.fast.request_head import InferHead

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.kernel import Kernel

    WithKernel = Callable[[Callable[[Kernel], object]], None]


def test_parts_become_one_body_and_memory_follows_what_has_come(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        data = bytes(range(251)) * 4_000
        upload = Upload(InferHead("echo", "", 0, IDENTITY), kernel.resolve("echo"), len(data), None)
        assert len(upload.body) == 0
        for place in range(0, len(data), 999):
            upload.add(data[place : place + 999])
            assert len(upload.body) <= max(64 << 10, 8 * upload.received)
        assert bytes(upload.body) == data

    with_kernel(test)


def test_a_body_with_a_place_is_received_there(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        model = kernel.resolve("echo")
        data = bytes(range(256)) * 1_000
        place = kernel.receive_buffer(model, len(data), 100)
        assert place is not None
        upload = Upload(InferHead("echo", "", 100, IDENTITY), model, len(data), place)
        upload.add(data[:1000])
        room = upload.room()
        assert room is not None
        room[:] = data[1000:]
        upload.received += len(room)
        assert bytes(upload.body) == data
        span = place.span(place.view[100:8000], 64)
        assert span is not None, "the first tensor is aligned"
        assert place.span(place.view[101:8000], 4) is None
        assert place.span(memoryview(bytearray(data)), 1) is None, "not a part of it"
        assert model.input_arena is not None
        place.release()
        assert model.input_arena.allocator.block_count == 1
        span.lease.release()
        assert model.input_arena.allocator.block_count == 0

    with_kernel(test)
