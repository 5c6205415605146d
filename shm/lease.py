"""Leases: counted uses of shared memory. A holder ends its own lease; what others hold is not touched.

A lease belongs to one tensor and one holder. It can be shared: the new lease is the other holder's, and the memory
stays until the last of them was released. `RegionLease` counts uses of a whole region, `BlockLease` those of one block
of an arena. `RegionNumber` stands for a lease in messages, where only the number of the region travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.region import Region


class Lease:
    """One use of shared memory. `release` ends it; a second call does nothing."""

    __slots__ = ()

    @property
    def region(self) -> Region:
        """The region that the memory belongs to."""
        raise NotImplementedError(f"{type(self).__name__} knows no region")

    @property
    def region_number(self) -> int:
        """The number by which messages name the region."""
        return self.region.number

    def share(self) -> Lease:
        """Return a lease of the same memory for another holder, also where the region was dropped."""
        raise NotImplementedError(f"{type(self).__name__} cannot be shared")

    def release(self) -> None:
        """End this use."""


class RegionNumber(Lease):
    """The number of a region in a message: the sender holds the lease. It has nothing to release."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    @property
    def region_number(self) -> int:
        return self._number


class RegionLease(Lease):
    """A use of a region as a whole."""

    __slots__ = ("_held", "_region")

    def __init__(self, region: Region) -> None:
        """Made by `Region.lease`, which counts it."""
        self._region = region
        self._held = True

    @property
    def region(self) -> Region:
        return self._region

    def share(self) -> RegionLease:
        assert self._held, f"the lease of region {self._region.name} was released"
        return self._region.another_lease()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._region.lease_released()


class LeasedBlock:
    """A block of an arena in use. `on_free` is called with its offset when the last lease is released.

    The block keeps its region: an arena whose process is gone stays readable as long as blocks of it are in use.
    """

    __slots__ = ("_count", "_of_region", "_on_free", "offset", "region")

    def __init__(self, region: Region, offset: int, on_free: Callable[[int], None]) -> None:
        self.region = region
        self.offset = offset
        self._of_region = region.lease()
        self._on_free = on_free
        self._count = 0

    @property
    def lease_count(self) -> int:
        return self._count

    def lease(self) -> BlockLease:
        """Return one more lease."""
        self._count += 1
        return BlockLease(self)

    def lease_released(self) -> None:
        """A lease was released; called by the lease, once."""
        self._count -= 1
        assert self._count >= 0, f"block at {self.offset}: more leases were released than taken"
        if not self._count:
            self._on_free(self.offset)
            self._of_region.release()


class BlockLease(Lease):
    """A use of a block."""

    __slots__ = ("_block", "_held")

    def __init__(self, block: LeasedBlock) -> None:
        """Made by `LeasedBlock.lease`, which counts it."""
        self._block = block
        self._held = True

    @property
    def region(self) -> Region:
        return self._block.region

    def share(self) -> BlockLease:
        assert self._held, f"the lease of the block at {self._block.offset} was released"
        return self._block.lease()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._block.lease_released()
