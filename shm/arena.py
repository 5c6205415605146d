"""Arenas: shared memory in which exactly one process allocates blocks; others only read, or fill them.

An arena is a memfd: it has no name that another process could open, and nothing is left of it when
its processes are gone, however they ended. Its file is sparse, so the byte size is a limit and not a cost.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

from shm.blocks import BlockAllocator
from shm.region import Region, RegionKind

if TYPE_CHECKING:
    from types import TracebackType

#: Tensors up to this many bytes travel inside messages: cheaper than a block (DESIGN §3).
INLINE_LIMIT = 4096


class Block:
    """A block of an arena that is in use. Stands for a lease in a `Span`; `release` frees it once."""

    __slots__ = ("_arena", "byte_size", "offset")

    def __init__(self, arena: Arena, offset: int, byte_size: int) -> None:
        self._arena: Arena | None = arena
        self.offset = offset
        self.byte_size = byte_size

    @property
    def region(self) -> Region:
        assert self._arena is not None, "the block was freed"
        return self._arena.region

    def view(self) -> memoryview:
        """Return the block's bytes, writable; valid until `release`."""
        assert self._arena is not None, "the block was freed"
        return self._arena.view(self.offset, self.byte_size)

    def release(self) -> None:
        if self._arena is not None:
            arena, self._arena = self._arena, None
            arena.free(self.offset)


class Arena:
    """An arena of this process, mapped. `capacity` bytes is a power of two."""

    def __init__(self, name: str, capacity: int) -> None:
        self.allocator = BlockAllocator(capacity)
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, capacity)
            self._map = mmap.mmap(fd, capacity)
        except BaseException:
            os.close(fd)
            raise
        self._view = memoryview(self._map)
        self.region = Region(name, RegionKind.ARENA, fd, capacity)
        self._closed = False

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, byte_size: int) -> Block | None:
        """Return a new block of exactly `byte_size` bytes, or None where the arena is full."""
        offset = self.allocator.take(byte_size)
        return None if offset is None else Block(self, offset, byte_size)

    def view(self, offset: int, byte_size: int) -> memoryview:
        return self._view[offset : offset + byte_size]

    def free(self, offset: int) -> None:
        """Free the block at `offset`; its pages go back to the system where enough others are kept."""
        if self._closed:
            return
        unused = self.allocator.give(offset)
        if unused is not None:
            self._map.madvise(mmap.MADV_REMOVE, *unused)

    def close(self) -> None:
        """Unmap and close. Views that are still held keep the mapping alive until they are gone."""
        if self._closed:
            return
        self._closed = True
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        self.region.drop()
