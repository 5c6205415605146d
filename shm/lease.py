"""Leases: counted uses of shared memory. Each holder releases its own lease.

A lease belongs to one tensor and one holder. `share` makes a lease for another holder. The memory stays until the last
lease is released. `RegionLease` counts uses of a whole region, `BlockLease` uses of one block of an arena.
`RegionNumber` takes the place of a lease in messages, which carry only the number of the region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.region import Region


class Lease:
    """One use of shared memory. `release` ends it; a second call does nothing."""

    __slots__ = ()

    #: The region that holds the memory. A `RegionNumber` has none.
    region: Region
    #: The number of the region in messages. An attribute, because every message with shared memory reads it.
    region_number: int

    def share(self) -> Lease:
        """Return a lease of the same memory for another holder, also after the region was dropped."""
        raise NotImplementedError(f"{type(self).__name__} cannot be shared")

    def release(self) -> None:
        """End this use."""


class RegionNumber(Lease):
    """The number of a region in a message. The sender holds the lease, so there is nothing to release."""

    __slots__ = ("region_number",)

    def __init__(self, number: int) -> None:
        self.region_number = number


class RegionLease(Lease):
    """A use of a whole region."""

    __slots__ = ("_held", "region", "region_number")

    def __init__(self, region: Region) -> None:
        """Only `Region` makes leases, and counts them."""
        self.region = region  # an attribute, because every request with shared memory reads it
        self.region_number = region.number
        self._held = True

    def share(self) -> RegionLease:
        assert self._held, f"the lease of region {self.region.name} was released"
        region = self.region
        region.lease_count += 1
        return RegionLease(region)

    def release(self) -> None:
        if self._held:
            self._held = False
            region = self.region
            region.lease_count = count = region.lease_count - 1
            if count <= 0 and (count or region.awaits_end):
                region.unused()


class LeasedBlock:
    """A block of an arena that is in use. Calls `on_free` with its offset when the last lease is released.

    The block has a lease of its region: an arena stays readable while its blocks are in use, also after its process
    has ended.
    """

    __slots__ = ("_count", "_on_free", "_region_lease", "offset", "region")

    def __init__(self, region: Region, offset: int, on_free: Callable[[int], None]) -> None:
        self.region = region
        self.offset = offset
        self._region_lease = region.lease()
        self._on_free = on_free
        self._count = 0

    @property
    def lease_count(self) -> int:
        return self._count

    def lease(self) -> BlockLease:
        """Return a new lease."""
        self._count += 1
        return BlockLease(self)

    def lease_released(self) -> None:
        """Count a released lease. Each lease calls this once."""
        self._count -= 1
        assert self._count >= 0, f"block at {self.offset}: more leases were released than taken"
        if not self._count:
            self._on_free(self.offset)
            self._region_lease.release()


class BlockLease(Lease):
    """A use of a block."""

    __slots__ = ("_block", "_held", "region", "region_number")

    def __init__(self, block: LeasedBlock) -> None:
        """Only `LeasedBlock.lease` makes these leases, and counts them."""
        self.region = region = block.region
        self.region_number = region.number
        self._block = block
        self._held = True

    def share(self) -> BlockLease:
        assert self._held, f"the lease of the block at {self._block.offset} was released"
        return self._block.lease()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._block.lease_released()
