"""Regions that the kernel announced to this worker: attached regions, mapped on first use, and copies.

A region has two properties. *Writable*: the worker may write to it, and other processes see that. A region that is not
writable is mapped privately: the model may change its inputs, and no other process sees the change. *Volatile*: another
process may change the bytes at any time, as a client in its own region.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kernel.errors import InternalError, InvalidArgument
from shm.written_pages import unwritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shm.tensor import Buffer

#: Reserve no memory for private pages: few are written (mmap(2)). Python's mmap lacks this constant.
_MAP_NORESERVE = 0x4000

#: Of fewer bytes it takes less time to drop or copy the pages than to find out whether they were written.
_LOOKED_AT_BYTE_SIZE = 64 << 10

_TRUNCATED = "shared memory region was truncated by its owner"

#: How many bytes of memory are kept for the next copies of inputs.
MAX_KEPT_BYTE_SIZE = 128 << 20


class WorkerRegion(Protocol):
    """A region as the worker uses it, by offsets from its start."""

    #: The kernel's number. Set by `AttachedRegions.attach`.
    number: int
    #: Whether another process may change the bytes at any time: a client's region.
    volatile: bool
    #: Whether no other process changes the bytes of an input while its request is executed.
    steady: bool
    #: Whether the kernel sees what the model writes to an input, so that an output can stay there.
    shared: bool
    #: Whether the memory is the worker's own, so that the model may use inputs without limit in time.
    private: bool
    #: Whether `view` returns the region itself, so that outputs can be made there; otherwise use `write`.
    in_place: bool

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return bytes, writable. Raises `InvalidArgument` if the owner of the region has shortened it."""

    def input_view(self, offset: int, byte_size: int) -> memoryview:
        """Return the bytes of an input until `ended`: read-only in a volatile region. Raises as `view`.

        A view of a bytearray is a copy: it is the caller's own, and `ended` is not called for it.
        """

    def write(self, offset: int, data: Buffer) -> None:
        """Store `data` at `offset`. Raises `ServingError` if that cannot be done."""

    def seen_by_all(self, address: int, byte_size: int) -> bool:
        """Whether the bytes at `address`, of a view, are those that other processes see, so that an output can stay
        there. False where that is not known."""

    def ended(self, offset: int, byte_size: int) -> None:
        """Nothing uses a view any more that `input_view` returned for these bytes, and that is not a copy."""

    def close(self) -> None:
        """Unmap or free the region. Arrays that still refer to it keep their memory."""


class AttachedRegion:
    """A `WorkerRegion` with a descriptor. Owns the descriptor and the mapping."""

    in_place = True

    def __init__(
        self, fd: int, byte_size: int, offset: int, *, writable: bool, volatile: bool, private_writes: bool = True
    ) -> None:
        """Without `private_writes` nothing writes to a region that is not writable: its views are read-only."""
        self.number = 0
        #: For an arena: the first bytes, as many as this, keep their pages and may be pinned.
        self.steady_byte_size = 0
        self.volatile = volatile
        self.private = False
        self.steady = self.shared = writable and not volatile
        self._writable = writable
        self._private_writes = private_writes
        self._fd = fd
        self._byte_size = byte_size
        self._offset = offset
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None
        #: Where the mapping begins; only in a region that is mapped privately.
        self._address = 0
        #: Pages, as (start, end), of inputs in use; only in a region that is mapped privately.
        self._pages_in_use: list[tuple[int, int]] = []
        #: Guards it: inputs are read by the main thread, results of calls by any.
        self._pages_lock = threading.Lock()

    def view(self, offset: int, byte_size: int) -> memoryview:
        if self._view is None:
            self._view = self._map()
        assert offset + byte_size <= self._byte_size, f"{byte_size} bytes at {offset} of {self._byte_size}"
        return self._view[offset : offset + byte_size]

    def _map(self) -> memoryview:
        # A mapping starts at a page: map from the start of the file, and let the view skip `offset`.
        end = self._offset + self._byte_size
        sharing = mmap.MAP_SHARED if self._writable else mmap.MAP_PRIVATE | _MAP_NORESERVE
        try:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if self._writable or self._private_writes else 0)
            self._mapping = mmap.mmap(self._fd, end, flags=sharing, prot=protection)
        except ValueError:  # the file is shorter than `end`
            raise InvalidArgument(_TRUNCATED) from None
        if not self._writable:
            self._address = np.frombuffer(self._mapping, np.uint8).__array_interface__["data"][0]
        return memoryview(self._mapping)[self._offset : end]

    @property
    def pinnable(self) -> memoryview | None:
        """The bytes that a device may have pinned: all bytes of a client's region, or the steady ones of an arena.

        None before the region is mapped, and for one whose pages are not those that others see.
        """
        if self._view is None or not self._writable:
            return None
        return self._view[:] if self.volatile else self._view[: self.steady_byte_size]

    def input_view(self, offset: int, byte_size: int) -> memoryview:
        if self.volatile:
            return self.view(offset, byte_size).toreadonly()
        if self._writable:
            return self.view(offset, byte_size)
        start, end = self._pages(offset, byte_size)
        with self._pages_lock:
            if not any(start < other_end and other_start < end for other_start, other_end in self._pages_in_use):
                self._pages_in_use.append((start, end))
                return self.view(offset, byte_size)
        # Another request uses these pages and may have changed the private copy: read the file.
        return memoryview(bytearray(os.pread(self._fd, byte_size, self._offset + offset)))

    def write(self, offset: int, data: Buffer) -> None:
        self.view(offset, len(data))[:] = data

    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes at `offset`, without mapping. Raises `InvalidArgument` if they are gone."""
        position = 0
        while position < len(memory):
            count = os.preadv(self._fd, [memory[position:]], self._offset + offset + position)
            if not count:
                raise InvalidArgument(_TRUNCATED)
            position += count

    def write_from(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`, without mapping. Raises `ServingError` if the file is too short, or cannot grow."""
        start = self._offset + offset
        if os.fstat(self._fd).st_size < start + len(data):  # a write would lengthen the client's object again
            raise InvalidArgument(_TRUNCATED)
        position = 0
        while position < len(data):
            try:
                position += os.pwrite(self._fd, data[position:], start + position)
            except OSError as error:  # pages that were never written, and no memory for them
                raise InternalError(f"shared memory region cannot be written: {error.strerror}") from None

    def seen_by_all(self, address: int, byte_size: int) -> bool:
        if self._writable or not self.in_place:
            return self.shared
        if self._mapping is None or not 0 <= address - self._address <= len(self._mapping) - byte_size:
            return False  # it is a copy
        return byte_size >= _LOOKED_AT_BYTE_SIZE and unwritten(address, byte_size)

    def ended(self, offset: int, byte_size: int) -> None:
        """See `WorkerRegion`. Drops private pages that the model wrote: they would be stale for the next input.

        Others stay mapped, because the next input in them would cost a fault for every few pages.
        """
        if self._writable:
            return
        start, end = self._pages(offset, byte_size)
        with self._pages_lock:
            self._pages_in_use.remove((start, end))
            if self._mapping is None:
                return
            if byte_size < _LOOKED_AT_BYTE_SIZE or not unwritten(self._address + start, end - start):
                self._mapping.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _pages(self, offset: int, byte_size: int) -> tuple[int, int]:
        """Return the start and the end of a span's pages in the mapping."""
        start, end = self._offset + offset, self._offset + offset + byte_size
        return start & -mmap.PAGESIZE, min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, self._offset + self._byte_size)

    def close(self) -> None:
        os.close(self._fd)
        if self._view is not None and self._mapping is not None:
            self._view.release()
            with contextlib.suppress(BufferError):
                self._mapping.close()


class CopyBuffers:
    """Memory for copies of inputs, reused when no array refers to it any more.

    New memory costs a page fault for each page, which for large inputs takes longer than the copy itself. Buffers have
    powers of two of bytes. Arrays over a buffer may live as long as they want, and end in any thread.
    """

    def __init__(self) -> None:
        #: Free buffers. Appending and removing are atomic: the garbage collector may free an array at any point.
        self._free: list[mmap.mmap] = []

    def take(self, byte_size: int) -> memoryview:
        """Return writable memory, which stays valid as long as there is an array over it."""
        if not byte_size:
            return memoryview(bytearray())
        capacity = max(mmap.PAGESIZE, 1 << (byte_size - 1).bit_length())
        memory = self._kept(capacity) or mmap.mmap(-1, capacity)
        # An array refers to the exporter of its memory, not to the memoryview from which it was made.
        exporter = np.frombuffer(memory, np.uint8)
        weakref.finalize(exporter, self._freed, memory).atexit = False
        return exporter.data[:byte_size]

    def _kept(self, capacity: int) -> mmap.mmap | None:
        """Return a kept buffer of this capacity. Drops those that are not asked for, oldest first."""
        for memory in reversed(self._free):  # the last one is in the processor's cache
            if len(memory) == capacity:
                self._free.remove(memory)
                return memory
        while sum(map(len, self._free)) > MAX_KEPT_BYTE_SIZE:
            del self._free[0]
        return None

    def _freed(self, memory: mmap.mmap) -> None:
        if len(memory) <= MAX_KEPT_BYTE_SIZE:
            self._free.append(memory)


class CopyingRegion(ABC):
    """What regions of clients have in common whose bytes are copied: one that must not be mapped, or one on a GPU.

    Inputs are copies, which belong to the model. Outputs are written when they are complete.
    """

    volatile = False
    steady = True
    shared = False
    private = True
    in_place = False

    _buffers: CopyBuffers

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return a copy. Raises as `read_into`."""
        copy = self._buffers.take(byte_size)
        self.read_into(offset, copy)
        return copy

    def input_view(self, offset: int, byte_size: int) -> memoryview:
        return self.view(offset, byte_size)

    def write(self, offset: int, data: Buffer) -> None:
        """See `WorkerRegion`. Raises as `write_from`."""
        self.write_from(offset, data)

    @abstractmethod
    def read_into(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the bytes at `offset`. Raises `ServingError`."""

    @abstractmethod
    def write_from(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`. Raises `ServingError`."""

    def seen_by_all(self, address: int, byte_size: int) -> bool:
        """See `WorkerRegion`: the model sees copies."""
        return False

    def ended(self, offset: int, byte_size: int) -> None:  # noqa: B027 - nothing is to be freed
        """See `WorkerRegion`: copies are freed with the last array over them."""


class UnmappedRegion(CopyingRegion):
    """A client's region that must not be mapped: a client that shortens it gets an error, and the worker continues."""

    def __init__(self, fd: int, byte_size: int, offset: int, buffers: CopyBuffers) -> None:
        """Copies are made in `buffers`. The region becomes the owner of `fd`."""
        self.number = 0
        self._file = AttachedRegion(fd, byte_size, offset, writable=True, volatile=False)
        self._buffers = buffers

    def read_into(self, offset: int, memory: memoryview) -> None:
        self._file.read_into(offset, memory)

    def write_from(self, offset: int, data: Buffer) -> None:
        self._file.write_from(offset, data)

    def close(self) -> None:
        self._file.close()


class CopiedRegion:
    """A copy of a region: the `WorkerRegion` of a worker without shared memory, to which the kernel sends the bytes."""

    volatile = False
    steady = True
    shared = False
    private = True
    in_place = True

    def __init__(self, byte_size: int) -> None:
        self.number = 0
        self._memory = bytearray(byte_size)

    def write(self, offset: int, data: Buffer) -> None:
        """Store received bytes. Raises ValueError if they are outside of the region."""
        if not 0 <= offset <= len(self._memory) - len(data):
            raise ValueError(f"{len(data)} bytes at {offset} of a region of {len(self._memory)}")
        self._memory[offset : offset + len(data)] = data

    def view(self, offset: int, byte_size: int) -> memoryview:
        return memoryview(self._memory)[offset : offset + byte_size]

    input_view = view

    def seen_by_all(self, address: int, byte_size: int) -> bool:
        """See `WorkerRegion`: nobody else has the copy."""
        return False

    def ended(self, offset: int, byte_size: int) -> None:
        """See `WorkerRegion`: the copy is freed by the kernel's `Detach`."""

    def close(self) -> None:
        """Do nothing: the copy goes with its last array."""


class AttachedRegions:
    """The regions of this worker, by the kernel's numbers."""

    def __init__(self) -> None:
        self._regions: dict[int, WorkerRegion] = {}
        #: Regions that others have replaced under their numbers. Threads of the model may still write to them.
        self._replaced: dict[int, WorkerRegion] = {}
        #: Is called with the number of a region before it is replaced or closed; None if nobody asks.
        self.on_end: Callable[[int], None] | None = None

    def __iter__(self) -> Iterator[WorkerRegion]:
        """All regions that requests may name, as of now."""
        return iter(list(self._regions.values()))

    def attach(self, number: int, region: WorkerRegion) -> None:
        """Add `region` as `number`, and own it from now on. It may replace another one, once."""
        region.number = number
        if number in self._regions:
            if self.on_end is not None:
                self.on_end(number)
            self._replaced[number] = self._regions[number]
        self._regions[number] = region

    def detach(self, number: int) -> None:
        """Remove a region and close it."""
        if self.on_end is not None:
            self.on_end(number)
        self._regions.pop(number).close()
        if number in self._replaced:
            self._replaced.pop(number).close()

    def close(self) -> None:
        """Forget all regions: the worker ends, and its process may continue."""
        for number in list(self._regions):
            self.detach(number)

    def find(self, number: int) -> WorkerRegion | None:
        """Return the region `number`, or None if the kernel did not announce it."""
        return self._regions.get(number)

    def get(self, number: int) -> WorkerRegion:
        """Return the region `number`. Raises KeyError if the kernel did not announce it."""
        return self._regions[number]
