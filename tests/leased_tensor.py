"""Output tensors in shared memory whose release a test can see."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shm.lease import LeasedBlock
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def leased_tensor(name: str, datatype: str, shape: list[int], data: bytes, on_release: Callable[[], None]) -> Tensor:
    """Return a tensor in a block of an arena of its own, as a worker's output is.

    `on_release` is called when the last lease of the block is released; then the arena is closed.
    """
    fd = os.memfd_create("test")
    os.ftruncate(fd, max(len(data), 1))
    os.pwrite(fd, data, 0)
    region = Region("test", RegionKind.ARENA, FileHandle(fd), max(len(data), 1))
    block = LeasedBlock(region, 0, lambda _: on_release())
    region.drop()  # it stays readable as long as the block is leased
    return Tensor(name, datatype, shape, None, Span(block.lease(), 0, len(data)))
