"""Regions that the kernel made known to this worker: attached ones, mapped on first use, and copies.

Two properties are told apart. *Writable*: the worker may write to the region, which others then see. A region that is
not is mapped privately, so that a model may change its inputs and nobody else sees it. *Volatile*: another process may
change the bytes at any time, as a client may in a region of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Protocol

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from shm.tensor import Buffer

#: Private pages that are never written need no memory: reserve none (mmap(2)); Python's mmap lacks the name.
_MAP_NORESERVE = 0x4000

_TRUNCATED = "shared memory region was truncated by its owner"


class WorkerRegion(Protocol):
    """A region as the worker uses it, by offsets from its start."""

    #: Whether another process may change the bytes at any time: a region of a client.
    volatile: bool
    #: Whether nobody else changes the bytes of an input while its request runs.
    steady: bool
    #: Whether the kernel sees what the model writes into an input, so that an output may stay there.
    shared: bool
    #: Whether the memory is the worker's own, so that a model may keep inputs as long as it likes.
    private: bool

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return writable bytes. Raises `InvalidArgument` where the owner of the region has shortened it."""

    def input_view(self, offset: int, byte_size: int) -> memoryview:
        """Return the bytes of an input until `ended`: read-only in a volatile region. Raises as `view`.

        A view of a bytearray is a copy: it is the caller's own, and `ended` is not called for it.
        """

    def ended(self, offset: int, byte_size: int) -> None:
        """Nothing uses a view any more that `input_view` returned for these bytes, and that is no copy."""

    def close(self) -> None:
        """Unmap or free the region; arrays that still point into it keep their memory."""


class AttachedRegion:
    """A region of a descriptor, which it owns together with the mapping."""

    def __init__(self, fd: int, byte_size: int, offset: int, *, writable: bool, volatile: bool) -> None:
        self.volatile = volatile
        self.private = False
        self.steady = self.shared = writable and not volatile
        self._writable = writable
        self._fd = fd
        self._byte_size = byte_size
        self._offset = offset
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None
        #: Inputs in use of a region that is mapped privately.
        self._private: list[tuple[int, int]] = []

    def view(self, offset: int, byte_size: int) -> memoryview:
        """See `WorkerRegion`."""
        if self._view is None:
            self._view = self._map()
        assert offset + byte_size <= self._byte_size, f"{byte_size} bytes at {offset} of {self._byte_size}"
        return self._view[offset : offset + byte_size]

    def _map(self) -> memoryview:
        # A mapping starts at a page: map from the start of the file and skip `offset` in the view.
        end = self._offset + self._byte_size
        sharing = mmap.MAP_SHARED if self._writable else mmap.MAP_PRIVATE | _MAP_NORESERVE
        try:
            self._mapping = mmap.mmap(self._fd, end, flags=sharing, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except ValueError:  # the file is shorter than `end`
            raise InvalidArgument(_TRUNCATED) from None
        return memoryview(self._mapping)[self._offset : end]

    def input_view(self, offset: int, byte_size: int) -> memoryview:
        """See `WorkerRegion`."""
        if self.volatile:
            return self.view(offset, byte_size).toreadonly()
        if self._writable:
            return self.view(offset, byte_size)
        start, end = self._pages(offset, byte_size)
        if any(start < other_end and other_start < end for other_start, other_end in self._private):
            # Another request uses these pages and may have changed its private copy of them: read the file.
            return memoryview(bytearray(os.pread(self._fd, byte_size, self._offset + offset)))
        self._private.append((start, end))
        return self.view(offset, byte_size)

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes at `offset`, without mapping. Raises `InvalidArgument` where they are gone."""
        position = 0
        while position < len(memory):
            count = os.preadv(self._fd, [memory[position:]], self._offset + offset + position)
            if not count:
                raise InvalidArgument(_TRUNCATED)
            position += count

    def write_from(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`, without mapping. Raises `InvalidArgument` where the region was shortened."""
        start = self._offset + offset
        if os.fstat(self._fd).st_size < start + len(data):  # writing would lengthen the client's object again
            raise InvalidArgument(_TRUNCATED)
        position = 0
        while position < len(data):
            position += os.pwrite(self._fd, data[position:], start + position)

    def ended(self, offset: int, byte_size: int) -> None:
        """See `WorkerRegion`. Pages that the model wrote to are private now, and would be stale for the next input."""
        pages = self._pages(offset, byte_size)
        if self._writable:
            return
        self._private.remove(pages)
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED, pages[0], pages[1] - pages[0])

    def _pages(self, offset: int, byte_size: int) -> tuple[int, int]:
        """Return where the pages of a span begin and end in the mapping."""
        start, end = self._offset + offset, self._offset + offset + byte_size
        return start & -mmap.PAGESIZE, min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, self._offset + self._byte_size)

    def close(self) -> None:
        """See `WorkerRegion`."""
        os.close(self._fd)
        if self._view is not None and self._mapping is not None:
            self._view.release()
            with contextlib.suppress(BufferError):
                self._mapping.close()


class CopiedRegion:
    """A region whose bytes the kernel sends, to a worker that shares no memory with it."""

    volatile = False
    steady = True
    shared = False
    private = True

    def __init__(self, byte_size: int) -> None:
        self._memory = bytearray(byte_size)

    def write(self, offset: int, data: Buffer) -> None:
        """Take the next bytes. Raises ValueError where they lie outside of the region."""
        if not 0 <= offset <= len(self._memory) - len(data):
            raise ValueError(f"{len(data)} bytes at {offset} of a region of {len(self._memory)}")
        self._memory[offset : offset + len(data)] = data

    def view(self, offset: int, byte_size: int) -> memoryview:
        """See `WorkerRegion`."""
        return memoryview(self._memory)[offset : offset + byte_size]

    input_view = view

    def ended(self, offset: int, byte_size: int) -> None:
        """See `WorkerRegion`: the copy is freed by the kernel's `Detach`."""

    def close(self) -> None:
        """See `WorkerRegion`."""


class AttachedRegions:
    """Regions by the numbers that the kernel gave them."""

    def __init__(self) -> None:
        self._regions: dict[int, WorkerRegion] = {}

    def attach(self, number: int, region: WorkerRegion) -> None:
        """Know `region`, which is ours now, as `number`."""
        self._regions[number] = region

    def detach(self, number: int) -> None:
        """Forget a region and close it."""
        self._regions.pop(number).close()

    def find(self, number: int) -> WorkerRegion | None:
        """Return the region `number`, None where the kernel never made it known."""
        return self._regions.get(number)

    def get(self, number: int) -> WorkerRegion:
        """Return the region `number`. Raises KeyError where the kernel never made it known."""
        return self._regions[number]
