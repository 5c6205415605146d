from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.http.compression import IDENTITY
from protocols.http.lane.head import InferHead
from protocols.http.lane.upload import Upload

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.router import Kernel

    WithKernel = Callable[[Callable[[Kernel], object]], None]


def test_parts_become_one_body_and_memory_follows_what_has_come(with_kernel: WithKernel) -> None:
    async def test(kernel: Kernel) -> None:
        data = bytes(range(251)) * 4_000
        upload = Upload(InferHead("echo", "", 0, IDENTITY), kernel.resolve("echo"), len(data))
        assert len(upload.body) == 0
        for place in range(0, len(data), 999):
            upload.add(data[place : place + 999])
            assert len(upload.body) <= max(64 << 10, 8 * upload.received)
        assert upload.body == data

    with_kernel(test)
