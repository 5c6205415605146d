"""Regions and leases: counted use of memory that several processes share.

A `Region` owns its file descriptor. Dropping a region (unregistering it) takes effect for new
users at once; the descriptor is closed when the last `Lease` is given back.
"""

from __future__ import annotations

import enum
import itertools
import os
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = itertools.count(1)


class RegionKind(enum.Enum):
    SYSTEM = "system"  # POSIX shared memory that a client registered
    CUDA = "cuda"  # device memory that a client registered by an IPC handle
    ARENA = "arena"  # a memfd of ours


class Region:
    """Shared memory known by a number that is unique in this process and never used again.

    `byte_size` bytes start at `offset` of the file behind `fd`. The region owns `fd`.
    """

    def __init__(self, name: str, kind: RegionKind, fd: int, byte_size: int, *, key: str = "", offset: int = 0) -> None:
        self.number = next(_numbers)
        self.name = name
        self.kind = kind
        self.fd = fd
        self.byte_size = byte_size
        self.key = key
        self.offset = offset
        #: The device of CUDA memory.
        self.device_id = 0
        self.dropped = False
        self._leases = 0
        self._on_closed: list[Callable[[Region], None]] = []

    @property
    def closed(self) -> bool:
        return self.fd < 0

    @property
    def leases(self) -> int:
        """How many uses have not been given back."""
        return self._leases

    def lease(self) -> Lease:
        """Count one more use. The caller gives the lease back exactly once."""
        assert not self.dropped, f"region {self.name} was dropped"
        self._leases += 1
        return Lease(self)

    def drop(self) -> None:
        """Refuse new leases, and close as soon as there are none."""
        self.dropped = True
        self._close_if_unused()

    def on_closed(self, callback: Callable[[Region], None]) -> None:
        """Call `callback` when the last use has ended, before the descriptor is closed."""
        self._on_closed.append(callback)

    def _returned(self) -> None:
        self._leases -= 1
        assert self._leases >= 0, f"region {self.name}: more leases given back than taken"
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.dropped and not self._leases and self.fd >= 0:
            for callback in self._on_closed:
                callback(self)
            self._on_closed.clear()
            os.close(self.fd)
            self.fd = -1


class Lease:
    """One use of a region. `release` ends it; a second call does nothing."""

    __slots__ = ("_held", "region")

    def __init__(self, region: Region) -> None:
        self.region = region
        self._held = True

    def release(self) -> None:
        if self._held:
            self._held = False
            self.region._returned()


class Held(Protocol):
    """A use of a region that ends with `release`: a `Lease`, or a `Block` of an arena."""

    @property
    def region(self) -> Region: ...

    def release(self) -> None: ...


class Span(msgspec.Struct, frozen=True):
    """A byte range of a region in use: `byte_size` bytes, `offset` bytes behind the region's start."""

    lease: Held
    offset: int
    byte_size: int

    @property
    def region(self) -> Region:
        return self.lease.region
