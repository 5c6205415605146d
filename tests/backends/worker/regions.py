"""Regions of a worker that a test makes."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from backends.worker.memory import AttachedRegion
from shm.arena import Arena
from shm.lease import RegionNumber
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


def attached_region(
    data: bytes, *, offset: int = 0, writable: bool = True, volatile: bool = False, byte_size: int | None = None
) -> AttachedRegion:
    """Return a region over a new memfd that holds `offset` zeros and then `data`; by default an arena of the kernel."""
    fd = os.memfd_create("test")
    os.pwrite(fd, data, offset)
    size = len(data) if byte_size is None else byte_size
    return AttachedRegion(fd, size, offset, writable=writable, volatile=volatile)


@contextlib.contextmanager
def arena_with(array: np.ndarray[tuple[int], np.dtype[np.float32]]) -> Iterator[tuple[Arena, Span]]:
    """Make an arena of another process with an array in it, and the array's place as messages name it."""
    with Arena("test", 1 << 16) as arena:
        block = arena.take(array.nbytes)
        assert block is not None
        block.view()[:] = array.tobytes()
        yield arena, Span(RegionNumber(7), block.offset, block.byte_size)
        block.release()
