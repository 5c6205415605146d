"""Arenas: shared memory in which exactly one process allocates blocks. Other processes read blocks, or fill them.

An arena is a memfd. It has no name that another process could open, and the system frees it when its last process ends,
also after SIGKILL. Its file is sparse: the byte size is a limit, not a cost. Its size is sealed (`shm/region.py`).
Writing is not sealed: the pages of freed blocks are returned by punching holes, and a hole counts as a write. So a
process that only reads gets a read-only descriptor (`read_only_fd`).
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from shm.blocks import MIN_BLOCK, BlockAllocator, ReturnedPages
from shm.lease import BlockLease, LeasedBlock
from shm.region import FileHandle, Region, RegionKind, sealed_memfd
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from shm.blocks import ByteBudget

#: Tensors of at most this many bytes travel inside messages: cheaper than a block
#: (docs/decisions/where-tensors-live.md).
INLINE_LIMIT = 4096


def pinned_window(pinned_byte_size: int) -> int:
    """Return how many bytes a worker pins at the start of an arena, if it may pin `pinned_byte_size` bytes in all.

    It is the largest power of two that is at most an eighth.

    Blocks at low offsets are taken first, so these are in use most of the time. Pure.
    """
    most = pinned_byte_size // 8
    return 1 << (most.bit_length() - 1) if most >= MIN_BLOCK else 0


class Block:
    """A new block with its first lease. The caller of `Arena.take` releases that lease."""

    __slots__ = ("_arena", "byte_size", "lease", "offset")

    def __init__(self, arena: Arena, offset: int, byte_size: int, lease: BlockLease) -> None:
        self._arena = arena
        self.offset = offset
        self.byte_size = byte_size
        self.lease = lease

    @property
    def span(self) -> Span:
        """The block as a span. The span has the block's first lease, not a new one."""
        return Span(self.lease, self.offset, self.byte_size)

    def view(self) -> memoryview:
        """Return the block's bytes, writable; valid until the lease is released."""
        return self._arena.region.view(self.offset, self.byte_size)

    def release(self) -> None:
        """Release the first lease."""
        self.lease.release()


#: The longest name of a memfd (memfd_create(2)).
_MAX_NAME_BYTE_SIZE = 249


class Arena:
    """An arena of this process, mapped. `capacity`, in bytes, is a power of two."""

    def __init__(
        self,
        name: str,
        capacity: int,
        budget: ByteBudget | None = None,
        later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Blocks are taken within `budget`, if there is one, which other arenas may share.

        `later` calls a function a little later, for an event loop: the pages of large blocks are given back in steps.
        """
        self.allocator = BlockAllocator(capacity)
        fd = sealed_memfd(os.fsdecode(os.fsencode(name)[:_MAX_NAME_BYTE_SIZE]), capacity)
        try:
            self.region = Region(name, RegionKind.ARENA, FileHandle(fd), capacity)
            #: None when the arena is closed, so that only views keep the mapping then.
            self._mapping: mmap.mmap | None = self.region.map(writable=True)
        except BaseException:
            os.close(fd)
            raise
        self._later = later
        self._returned_pages = ReturnedPages(self._remove_pages, self.allocator.returned)
        self._budget = budget
        #: The byte sizes of the blocks in use, as the budget counts them.
        self.charged: dict[int, int] = {}

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take(self, byte_size: int) -> Block | None:
        """Return a new block of exactly `byte_size` bytes, or None if the arena or the budget is full."""
        if self._budget is not None and not self._budget.has_room(byte_size):
            return None
        offset = self.allocator.take(byte_size)
        if offset is None and self._returned_pages:
            self._returned_pages.finish()
            offset = self.allocator.take(byte_size)
        if offset is None:
            return None
        if self._budget is not None:
            self._budget.add(byte_size)
            self.charged[offset] = byte_size
        return Block(self, offset, byte_size, LeasedBlock(self.region, offset, self._free).lease())

    def _free(self, offset: int) -> None:
        """Free the block at `offset`. Returns its pages to the system when enough freed blocks are cached."""
        if self._budget is not None:
            self._budget.remove(self.charged.pop(offset))
        if self._mapping is None:
            return
        unused = self.allocator.free(offset)
        if unused is None:
            return
        waiting = bool(self._returned_pages)
        self._returned_pages.add(*unused)
        if self._later is None:
            self._returned_pages.finish()
        elif not waiting:
            self._later(self._return_pages)

    def _return_pages(self) -> None:
        """Give back some pages of freed blocks."""
        if self._mapping is not None and self._returned_pages:
            self._returned_pages.step()
            if self._returned_pages and self._later is not None:
                self._later(self._return_pages)

    def _remove_pages(self, offset: int, byte_size: int) -> None:
        assert self._mapping is not None, "pages of a closed arena"
        start, end = max(offset, self.region.steady_byte_size), offset + byte_size
        if start < end:
            self._mapping.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Drop the region: it is unmapped and closed after the last lease and the last view."""
        if self._mapping is not None:
            self._mapping = None
            self.region.drop()
