"""Regions: memory that several processes share, with the handle by which a process gets at it.

A `Region` owns its handle, and its mapping where this process has one. Dropping a region refuses new leases at once;
handle and mapping are closed when the last lease is released.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import mmap
import os
from typing import TYPE_CHECKING

import msgspec

from shm.lease import RegionLease

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = itertools.count(1)


def new_region_number() -> int:
    """Return a number that no region of this process has or had."""
    return next(_numbers)


class RegionKind(enum.Enum):
    SYSTEM = "system"  # POSIX shared memory that a client registered
    CUDA = "cuda"  # device memory that a client registered by an IPC handle
    ARENA = "arena"  # a memfd of ours


class FileHandle(msgspec.Struct):
    """A descriptor of a memfd or of a POSIX object. The region that has the handle closes it."""

    fd: int

    @property
    def closed(self) -> bool:
        return self.fd < 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class CudaIpcHandle(msgspec.Struct):
    """Memory of a CUDA device, by the handle that `cudaIpcGetMemHandle` made in the exporting process."""

    #: The 64 bytes of a `cudaIpcMemHandle_t`.
    raw: bytes
    device_id: int
    closed: bool = False

    def close(self) -> None:
        """The handle is data and needs no closing: processes close their own mappings."""
        self.closed = True


Handle = FileHandle | CudaIpcHandle


class Region:
    """Shared memory known by a number that is unique in this process and never used again.

    `byte_size` bytes start at `offset` of what `handle` opens. `key` is the name that a client registered.
    """

    def __init__(
        self, name: str, kind: RegionKind, handle: Handle, byte_size: int, *, key: str = "", offset: int = 0
    ) -> None:
        """The region owns `handle` from now on."""
        self.number = new_region_number()
        self.name = name
        self.kind = kind
        self.handle = handle
        self.byte_size = byte_size
        self.key = key
        self.offset = offset
        self.dropped = False
        self._lease_count = 0
        self._mapping: mmap.mmap | None = None
        self._view: memoryview | None = None
        self._on_closed: list[Callable[[Region], None]] = []
        self._on_unused: list[Callable[[Region], None]] = []

    @property
    def of_client(self) -> bool:
        """Whether a client registered the region and may change its bytes at any time."""
        return self.kind is not RegionKind.ARENA

    @property
    def fd(self) -> int:
        """The descriptor of a region that has one."""
        assert isinstance(self.handle, FileHandle), f"region {self.name} has no descriptor"
        return self.handle.fd

    @property
    def device_id(self) -> int:
        """The CUDA device of the memory, 0 for memory of the host."""
        return self.handle.device_id if isinstance(self.handle, CudaIpcHandle) else 0

    @property
    def closed(self) -> bool:
        return self.handle.closed

    @property
    def lease_count(self) -> int:
        """How many leases have not been released."""
        return self._lease_count

    def lease(self) -> RegionLease:
        """Return one more lease; the caller releases it once."""
        assert not self.dropped, f"region {self.name} was dropped"
        return self.another_lease()

    def map(self, *, writable: bool) -> mmap.mmap:
        """Map the region into this process, until it is closed. Only for arenas: a client could shorten its region."""
        assert not self.of_client, f"region {self.name} is a client's"
        assert self._mapping is None, f"region {self.name} is mapped already"
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._mapping = mmap.mmap(self.fd, self.byte_size, prot=protection)
        self._view = memoryview(self._mapping)
        return self._mapping

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return bytes of an arena, which is mapped for reading unless this process has mapped it before.

        The view is valid as long as its user has a lease.
        """
        if self._view is None:
            self.map(writable=False)
        assert self._view is not None
        return self._view[offset : offset + byte_size]

    def drop(self) -> None:
        """Refuse new leases, and close the handle as soon as there are none."""
        self.dropped = True
        self._close_if_unused()

    def on_closed(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` when the last lease was released after `drop`, before the handle is closed."""
        self._on_closed.append(callback)

    def on_unused(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` once, when the last lease is released; the region must be in use."""
        assert self._lease_count, f"region {self.name} is not in use"
        self._on_unused.append(callback)

    def another_lease(self) -> RegionLease:
        """Return one more lease, also of a region that was dropped: for who shares a lease that still counts."""
        self._lease_count += 1
        return RegionLease(self)

    def lease_released(self) -> None:
        """A lease was released; called by the lease, once."""
        self._lease_count -= 1
        assert self._lease_count >= 0, f"region {self.name}: more leases were released than taken"
        if not self._lease_count and self._on_unused:
            callbacks, self._on_unused = self._on_unused, []
            for callback in callbacks:
                callback(self)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.dropped and not self._lease_count and not self.closed:
            callbacks, self._on_closed = self._on_closed, []
            for callback in callbacks:
                callback(self)
            self.handle.close()
            self._unmap()

    def _unmap(self) -> None:
        if self._view is not None and self._mapping is not None:
            self._view.release()
            # Views that are still held keep the mapping; it goes with the last of them.
            with contextlib.suppress(BufferError):
                self._mapping.close()
