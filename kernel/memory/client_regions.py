"""The regions that clients registered, by name: register, lease with bounds checks, list, unregister.

Texts and codes are Triton's (shared_memory_manager.cc). Nothing here maps memory: the kernel holds descriptors, and
workers map them. The module is in `kernel` and not in `shm` because it raises errors of `kernel.errors`.

A `peer` is the client that asks, as a text; front doors pass it on (`protocols/access.py`). Either all clients share
the names, as in Triton, or each has names of its own (`--shared-memory-owner=peer`): then no client can use, remove,
see or take the names of another one.

If a process accesses mapped memory that no longer exists, the process ends (SIGBUS). The owner of a region's file can
shorten it at any time, as can users to whom the owner gives write access. So a user who has done this is distrusted for
a time: regions of that user are copied and not mapped. The address of a client does not count: all clients of a
machine share it.
"""

from __future__ import annotations

import logging
import os
import time
from os import fstat
from typing import TYPE_CHECKING, Protocol

from kernel.errors import (
    ArenaFull,
    InternalError,
    InvalidArgument,
    NoDescriptorLeft,
    NotFound,
    RegionExists,
    RegionNotFound,
    file_error,
)
from kernel.machine import is_reserved
from kernel.observe.limited_log import LimitedLog
from shm.lease import Lease
from shm.region import (
    RESERVED_PREFIX,
    BadKey,
    CannotOpen,
    CudaIpcHandle,
    FileHandle,
    Region,
    RegionKind,
    is_reserved_key,
    open_object,
    size_of,
)
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shm.blocks import ByteBudget
    from shm.lease import RegionLease
    from shm.tensor import ClientSpan

#: The owner of all names that clients share.
_EVERYBODY = ""

_NO_REGIONS: dict[str, Region] = {}


class RegionTables:
    """Regions, each with the client that has registered it: a text, see `protocols/access.py`."""

    def __init__(self, *, owned: bool) -> None:
        """With `owned`, each client has names of its own."""
        self._owned = owned
        #: The names that all clients share. Read-only for others.
        self.shared: dict[str, Region] = {}
        self._tables: dict[str, dict[str, Region]] = {_EVERYBODY: self.shared}
        #: Region number → the client that has registered it; and how many each client has.
        self._peers: dict[int, str] = {}
        self._counts: dict[str, int] = {}

    def __iter__(self) -> Iterator[Region]:
        """Return all regions. They may be removed meanwhile."""
        return iter([region for table in self._tables.values() for region in table.values()])

    def __len__(self) -> int:
        return len(self._peers)

    def names(self, peer: str) -> dict[str, Region]:
        """Return the regions that a client may use, by name. Read-only."""
        return self._tables.get(peer, _NO_REGIONS) if self._owned else self.shared

    def count(self, peer: str) -> int:
        """Return how many regions a client has registered."""
        return self._counts.get(peer, 0)

    def add(self, region: Region, peer: str) -> None:
        """Add a region that a client has registered. The client has no other of this name."""
        owner = peer if self._owned else _EVERYBODY
        self._tables.setdefault(owner, {})[region.name] = region
        self._peers[region.number] = peer
        self._counts[peer] = self.count(peer) + 1

    def remove(self, region: Region) -> None:
        """Remove a region; nothing happens if it was removed before."""
        peer = self._peers.pop(region.number, None)
        if peer is None:
            return
        owner = peer if self._owned else _EVERYBODY
        del self._tables[owner][region.name]
        if owner and not self._tables[owner]:
            del self._tables[owner]
        self._counts[peer] -= 1
        if not self._counts[peer]:
            del self._counts[peer]


#: How long a user is distrusted after the last time. A single error of a client is forgiven after this time;
#: one that does it on purpose can end workers once in this time.
DISTRUST_NS = 600 * 1_000_000_000


class DistrustedUsers:
    """User ids, each with the time until which it is distrusted."""

    def __init__(self) -> None:
        self._until_ns: dict[int, int] = {}

    def add(self, uid: int, now_ns: int) -> bool:
        """Distrust a user from now on. Returns whether the user was trusted before."""
        trusted = not self.has(uid, now_ns)
        self._until_ns[uid] = now_ns + DISTRUST_NS
        return trusted

    def has(self, uid: int, now_ns: int) -> bool:
        """Whether a user is distrusted now."""
        return now_ns < self._until_ns.get(uid, 0)


logger = logging.getLogger(__name__)

#: A client may register and shorten a region as often as it likes.
_shortened = LimitedLog(logger, logging.WARNING)

#: Limits the descriptors that clients can make the server hold. No known client needs as many.
MAX_REGIONS = 1024

_UINT64_MAX = 2**64 - 1

_MAX_DEVICE_ID = 2**31 - 1


class CopiedLease(Lease):
    """A use of a region whose bytes are copied: the copy counts in the budget until the use ends."""

    __slots__ = ("_budget", "_byte_size", "_held", "_lease", "region", "region_number")

    def __init__(self, lease: RegionLease, byte_size: int, budget: ByteBudget) -> None:
        """The caller has checked that `budget` has room."""
        self.region = lease.region
        self.region_number = lease.region_number
        self._lease = lease
        self._byte_size = byte_size
        self._budget = budget
        self._held = True
        budget.add(byte_size)

    def share(self) -> RegionLease:
        """Return a lease of the region alone."""
        return self._lease.share()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._budget.remove(self._byte_size)
            self._lease.release()


class DeviceMemoryCheck(Protocol):
    """Opens memory of GPUs in another process. Implemented by `backends.helper.server_devices`."""

    async def check(self, region: Region) -> None:
        """Open the memory, and keep it open until the region is dropped. Raises `ServingError` if that fails."""


class RegionRegistry:
    """Client regions by name.

    A region that is unregistered while requests use it stays listed and usable until the last of them has ended, as
    in Triton since 2024-11. Then the region is removed and its memory is freed.

    Workers map regions. After a client has shortened one, the regions of its user are copied for a time, see
    `kernel/memory/client_regions.py`.
    """

    def __init__(
        self,
        *,
        owned: bool = False,
        per_peer_limit: int = 0,
        budget: ByteBudget | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """With `owned`, only the client that has registered a region may use, list and unregister it.

        `per_peer_limit` is the most regions of a client; 0 for no limit. Copies of regions count in `budget`.
        """
        #: Opens memory of GPUs; None if this server can use none.
        self.devices: DeviceMemoryCheck | None = None
        #: Whether `lease` needs to know the client.
        self.owned = owned
        self.per_peer_limit = per_peer_limit
        self._tables = RegionTables(owned=owned)
        self._shared = self._tables.shared  # every request with a region looks it up
        self._budget = budget
        self._now_ns = now_ns
        self._distrusted = DistrustedUsers()

    # ---- system shared memory ----------------------------------------------------------------

    def register_system(self, name: str, key: str, offset: int, byte_size: int, peer: str = "") -> None:
        """Register `byte_size` bytes from `offset` of the POSIX object `key` under `name`. Raises `ServingError`."""
        if name in self._tables.names(peer):
            raise RegionExists(name)
        if is_reserved_key(key):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the "
                f"reserved prefix '{RESERVED_PREFIX}'"
            )
        if not key.strip("/"):
            raise InvalidArgument(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
        self._check_count(name, peer)
        try:
            fd = open_object(key)
        except BadKey:
            raise InternalError(f"Unable to open shared memory region: '{key}'") from None
        except CannotOpen as error:
            raise file_error(f"Unable to open shared memory region: '{key}'", error) from None
        if is_reserved(fd):
            os.close(fd)
            raise NoDescriptorLeft
        if byte_size < 1 or offset < 0 or offset + byte_size > size_of(fd):
            os.close(fd)
            raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
        region = Region(name, RegionKind.SYSTEM, FileHandle(fd), byte_size, key=key, offset=offset)
        region.copied = self._distrusted.has(os.fstat(fd).st_uid, self._now_ns())
        region.on_fault = self._faulted
        self._tables.add(region, peer)

    def _check_count(self, name: str, peer: str) -> None:
        if len(self._tables) >= MAX_REGIONS:
            raise InvalidArgument(
                f"cannot register shared memory region '{name}': {MAX_REGIONS} regions are registered already; "
                "unregister those that are not needed"
            )
        if self.per_peer_limit and self._tables.count(peer) >= self.per_peer_limit:
            raise InvalidArgument(
                f"cannot register shared memory region '{name}': this client has registered {self.per_peer_limit} "
                "regions, which is the most that one client may have (--shared-memory-regions-per-peer); unregister "
                "those that are not needed"
            )

    # ---- CUDA shared memory ------------------------------------------------------------------

    async def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int, peer: str = "") -> None:
        """Register `byte_size` bytes of the allocation that a handle of another process names. Raises `ServingError`.

        Another process opens the memory, so this takes a moment.
        """
        if self.devices is None:
            raise InvalidArgument(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")
        if name in self._tables.names(peer):
            raise RegionExists(name)
        self._check_count(name, peer)
        if not 0 < byte_size <= _UINT64_MAX or not 0 <= device_id <= _MAX_DEVICE_ID:
            raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
        region = Region(name, RegionKind.CUDA, CudaIpcHandle(raw_handle, device_id), byte_size)
        try:
            await self.devices.check(region)
            if name in self._tables.names(peer):
                raise RegionExists(name)
            self._check_count(name, peer)
        except BaseException:
            region.drop()
            raise
        self._tables.add(region, peer)

    # ---- both --------------------------------------------------------------------------------

    def all(self) -> list[Region]:
        """Return the regions of all clients."""
        return list(self._tables)

    def status(self, kind: RegionKind, name: str = "", peer: str = "") -> list[Region]:
        """Return the regions of `kind` in the order of their names, or the one called `name`."""
        regions = self._tables.names(peer)
        if not name:
            return [r for _, r in sorted(regions.items()) if r.kind is kind]
        region = regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find {kind.value} shared memory region: '{name}'")
        if region.kind is not kind:
            shown = {RegionKind.SYSTEM: "system", RegionKind.CUDA: "CUDA"}
            raise NotFound(
                f"The region named '{name}' is registered as {shown[region.kind]} shared memory, "
                f"not {shown[kind]} shared memory"
            )
        return [region]

    def unregister(self, kind: RegionKind, name: str = "", peer: str = "") -> None:
        """Remove the region called `name`, or all of `kind`, once unused. An unknown name is not an error."""
        for region in list(self._tables.names(peer).values()):
            if region.kind is kind and name in ("", region.name):
                if region.lease_count:
                    region.on_unused(self._remove)
                else:
                    self._remove(region)

    def _remove(self, region: Region) -> None:
        """Remove a region and drop it."""
        self._tables.remove(region)
        region.drop()

    def lease(self, wanted: ClientSpan, peer: str = "") -> Span:
        """Return a leased span for a client's span; the caller releases its lease. Raises `ServingError`.

        `peer` matters only if `owned`.
        """
        regions = self._tables.names(peer) if self.owned else self._shared
        region = regions.get(wanted.name)
        if region is None:
            raise RegionNotFound(wanted.name)
        offset, byte_size = wanted.offset, wanted.byte_size
        if not (0 <= offset < region.byte_size and byte_size >= 0 and 0 < offset + byte_size <= region.byte_size):
            raise _outside(wanted, region)
        # The client may have shortened the object meanwhile: access beyond its end would kill a worker.
        handle = region.handle
        if type(handle) is FileHandle and fstat(handle.fd).st_size < region.offset + region.byte_size:
            self._faulted([region], [])
            raise InvalidArgument(f"shared memory region '{wanted.name}' was truncated by its owner")
        if region.copied and self._budget is not None:
            if not self._budget.has_room(byte_size):
                raise ArenaFull(byte_size)
            return Span(CopiedLease(region.lease(), byte_size, self._budget), offset, byte_size)
        return Span(region.lease(), offset, byte_size)

    # ---- shortened regions -------------------------------------------------------------------

    def _faulted(self, mapped: Sequence[Region], used: Sequence[Region]) -> None:
        """One of the regions `mapped` is shorter than it was registered, or was for a moment.

        Those that are shorter now are removed. If none is, the owner has lengthened it again: then the regions that
        were `used` at that moment are suspects, or else all of them.
        """
        shortened = [region for region in mapped if _is_shortened(region)]
        for region in shortened or used or mapped:
            self._distrust(os.fstat(region.fd).st_uid)
            region.copy_from_now_on()  # requests that have leased it may still wait
        for region in shortened:
            _shortened.log(
                "shared memory regions",
                "shared memory region '%s' was truncated by its owner and is removed",
                region.name,
            )
            self._remove(region)

    def _distrust(self, uid: int) -> None:
        """Copy all regions of a user, and those that are registered within the next time."""
        if not self._distrusted.add(uid, self._now_ns()):
            return
        logger.warning(
            "a client's shared memory was truncated while it was registered: for %d minutes, the regions of user %d "
            "are copied instead of mapped, which is slower",
            DISTRUST_NS // 60_000_000_000, uid,
        )  # fmt: skip
        for region in self._tables:
            if region.kind is RegionKind.SYSTEM and os.fstat(region.fd).st_uid == uid:
                region.copy_from_now_on()

    def close(self) -> None:
        """Remove all regions, also those in use, whose memory is freed after the last lease."""
        for region in self._tables:
            self._remove(region)


def _outside(wanted: ClientSpan, region: Region) -> InvalidArgument:
    """Return the error for a span that does not lie in its region, in Triton's words."""
    if not 0 <= wanted.offset < region.byte_size:  # Triton looks at the offset first
        return InvalidArgument(f"Invalid offset for shared memory region: '{wanted.name}'")
    if wanted.byte_size < 0 or wanted.offset + wanted.byte_size > _UINT64_MAX:
        return InvalidArgument(
            f"Integer overflow detected: byte_size ({wanted.byte_size}) + offset ({wanted.offset}) exceeds "
            f"maximum value ({_UINT64_MAX}) for region '{wanted.name}'"
        )
    # Triton also refuses 0 bytes at offset 0.
    return InvalidArgument(f"Invalid offset + byte size for shared memory region: '{wanted.name}'")


def _is_shortened(region: Region) -> bool:
    return size_of(region.fd) < region.offset + region.byte_size
