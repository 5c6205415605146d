"""The regions that clients registered, by name: register, lease with bounds checks, list, unregister.

Texts and codes are Triton's (shared_memory_manager.cc). Nothing here maps memory: the kernel holds descriptors, and
workers map them. The module is in `kernel` and not in `shm` because it raises errors of `kernel.errors`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kernel.descriptors import is_reserved
from kernel.errors import (
    InternalError,
    InvalidArgument,
    NoDescriptorLeft,
    NotFound,
    RegionExists,
    RegionNotFound,
    file_error,
)
from shm import posix
from shm.region import FileHandle, Region, RegionKind
from shm.tensor import Span

if TYPE_CHECKING:
    from shm.tensor import ClientSpan

#: Limits the descriptors that clients can make the server hold. No known client needs as many.
MAX_REGIONS = 1024
_UINT64_MAX = 2**64 - 1


class RegionRegistry:
    """Client regions by name.

    A region that is unregistered while requests use it stays listed and usable until the last of them has ended, as
    in Triton since 2024-11. Then the region is removed and its memory is freed.
    """

    def __init__(self) -> None:
        self._regions: dict[str, Region] = {}

    # ---- system shared memory ----------------------------------------------------------------

    def register_system(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register `byte_size` bytes from `offset` of the POSIX object `key` under `name`. Raises `ServingError`."""
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
        except posix.BadKey:
            raise InternalError(f"Unable to open shared memory region: '{key}'") from None
        except posix.CannotOpen as error:
            raise file_error(f"Unable to open shared memory region: '{key}'", error) from None
        if is_reserved(fd):
            os.close(fd)
            raise NoDescriptorLeft
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
        """Remove the region called `name`, or all of `kind`, once unused. An unknown name is not an error."""
        for region in list(self._regions.values()):
            if region.kind is kind and name in ("", region.name):
                if region.lease_count:
                    region.on_unused(self._remove)
                else:
                    self._remove(region)

    def _remove(self, region: Region) -> None:
        """Remove a region and drop it."""
        if self._regions.get(region.name) is region:
            del self._regions[region.name]
        region.drop()

    def lease(self, wanted: ClientSpan) -> Span:
        """Return a leased span for a client's span; the caller releases its lease. Raises `ServingError`."""
        region = self._regions.get(wanted.name)
        if region is None:
            raise RegionNotFound(wanted.name)
        end = wanted.offset + wanted.byte_size
        if wanted.offset < 0 or wanted.byte_size < 0 or end > _UINT64_MAX:
            raise InvalidArgument(
                f"Integer overflow detected: byte_size ({wanted.byte_size}) + offset ({wanted.offset}) exceeds "
                f"maximum value ({_UINT64_MAX}) for region '{wanted.name}'"
            )
        if wanted.offset >= region.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{wanted.name}'")
        # Triton also refuses 0 bytes at offset 0.
        if not 0 < end <= region.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{wanted.name}'")
        # The client may have shortened the object meanwhile: access beyond its end would kill a worker.
        if region.kind is RegionKind.SYSTEM and posix.size_of(region.fd) < region.offset + region.byte_size:
            raise InvalidArgument(f"shared memory region '{wanted.name}' was truncated by its owner")
        return Span(region.lease(), wanted.offset, wanted.byte_size)

    def close(self) -> None:
        """Remove all regions, also those in use, whose memory is freed after the last lease."""
        for region in list(self._regions.values()):
            self._remove(region)
