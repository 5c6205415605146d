"""The regions that clients registered, by name: register, look up with bounds, list, unregister.

Texts and codes are Triton's (shared_memory_manager.cc). Nothing here maps memory: the kernel holds
descriptors, workers map them. It stands in `kernel` and not in `shm` because it speaks its errors.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kernel.errors import (
    InternalError,
    InvalidArgument,
    NotFound,
    RegionExists,
    RegionNotFound,
)
from shm import posix
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import Span

if TYPE_CHECKING:
    from shm.tensor import ClientSpan

#: Enough for every client that was seen; a bound on descriptors that a client can make us hold.
MAX_REGIONS = 1024
_UINT64_MAX = 2**64 - 1


class RegionRegistry:
    """Client regions by name.

    A region that is unregistered while requests use it stays listed and usable until the last of them has ended, as
    in Triton since 2024-11; then its name and its memory go.
    """

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    # ---- system shared memory ----------------------------------------------------------------

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register `byte_size` bytes from `offset` of the POSIX object `key` under `name`."""
        if name in self._regions:
            raise RegionExists(name)
        if posix.is_reserved(key):
            raise InvalidArgument(
                f"cannot register shared memory region '{name}' with key '{key}' as the key contains the "
                f"reserved prefix '{posix.RESERVED_PREFIX}'"
            )
        if not key.strip("/"):
            raise InvalidArgument(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
        if len(self._regions) >= MAX_REGIONS:
            raise InvalidArgument(
                f"cannot register shared memory region '{name}': {MAX_REGIONS} regions are registered already; "
                "unregister those that are not needed"
            )
        try:
            fd = posix.open_object(key)
        except (posix.BadKey, posix.CannotOpen):
            raise InternalError(f"Unable to open shared memory region: '{key}'") from None
        if byte_size < 1 or offset < 0 or offset + byte_size > posix.size_of(fd):
            os.close(fd)
            raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
        region = Region(name, RegionKind.SYSTEM, FileHandle(fd), byte_size, key=key, offset=offset)
        self._regions[name] = region

    # ---- CUDA shared memory ------------------------------------------------------------------

    def register_cuda(self, name: str, raw_handle: bytes, device_id: int, byte_size: int) -> None:
        """Refuse: no worker of this server can open device memory."""
        raise InvalidArgument(f"failed to register CUDA shared memory region: '{name}', GPUs not supported")

    # ---- both --------------------------------------------------------------------------------

    def status(self, kind: RegionKind, name: str = "") -> list[Region]:
        """Return the regions of `kind` in the order of their names, or the one called `name`."""
        if not name:
            return [r for _, r in sorted(self._regions.items()) if r.kind is kind]
        region = self._regions.get(name)
        if region is None:
            raise NotFound(f"Unable to find {kind.value} shared memory region: '{name}'")
        if region.kind is not kind:
            shown = {RegionKind.SYSTEM: "system", RegionKind.CUDA: "CUDA"}
            raise NotFound(
                f"The region named '{name}' is registered as {shown[region.kind]} shared memory, "
                f"not {shown[kind]} shared memory"
            )
        return [region]

    def unregister(self, kind: RegionKind, name: str = "") -> None:
        """Forget the region called `name`, or all of `kind`, when no request uses it. An unknown name is no error."""
        for region in list(self._regions.values()):
            if region.kind is kind and name in ("", region.name):
                if region.lease_count:
                    region.on_unused(self._forget)
                else:
                    self._forget(region)

    def _forget(self, region: Region) -> None:
        """Forget a region that is not in use."""
        if self._regions.get(region.name) is region:
            del self._regions[region.name]
        region.drop()

    def lease(self, place: ClientSpan) -> Span:
        """Return a span for the bytes that `place` names; the caller releases its lease. Raises `ServingError`."""
        region = self._regions.get(place.name)
        if region is None:
            raise RegionNotFound(place.name)
        end = place.offset + place.byte_size
        if place.offset < 0 or place.byte_size < 0 or end > _UINT64_MAX:
            raise InvalidArgument(
                f"Integer overflow detected: byte_size ({place.byte_size}) + offset ({place.offset}) exceeds "
                f"maximum value ({_UINT64_MAX}) for region '{place.name}'"
            )
        if place.offset >= region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{place.name}'")
        # No bytes at the very beginning end before the region begins (Triton).
        if not 0 < end <= region.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{place.name}'")
        # The client may have shortened the object since: touching bytes behind the end kills a worker.
        if region.kind is RegionKind.SYSTEM and posix.size_of(region.fd) < region.offset + region.byte_size:
            raise InvalidArgument(f"shared memory region '{place.name}' was truncated by its owner")
        return Span(region.lease(), place.offset, place.byte_size)

    def close(self) -> None:
        """Forget all regions, also those in use: their memory goes with the last lease."""
        for region in list(self._regions.values()):
            self._forget(region)
