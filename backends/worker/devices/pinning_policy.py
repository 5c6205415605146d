"""Which memory of the host an instance on a GPU has pinned, within one limit. Pure, except for a lock.

Pinned memory cannot be swapped out, and a device copies from and to it directly. To pin a region takes as long as five
to ten copies of it, so only regions that are used again and again are pinned.
"""

from __future__ import annotations

import threading
from typing import Optional

import msgspec

#: Clients' regions of fewer bytes are not pinned: copying them to pinned memory takes less time than a call of CUDA.
MIN_REGION_BYTE_SIZE = 1 << 20

#: The number of uses after which a client's region is pinned.
MIN_USES = 16

#: A pinned region may be unpinned for another one if the others had this number of uses since its last use.
IDLE_USES = 4 * MIN_USES


class PinnedBudget:
    """The pinned bytes of an instance. Callable from any thread."""

    def __init__(self, limit_byte_size: int) -> None:
        self.limit_byte_size = limit_byte_size
        self.used_byte_size = 0
        self._lock = threading.Lock()

    @property
    def free_byte_size(self) -> int:
        """How many bytes can be taken."""
        return self.limit_byte_size - self.used_byte_size

    def take(self, byte_size: int) -> bool:
        """Count bytes that are about to be pinned; returns False, and counts nothing, if they are too many."""
        with self._lock:
            if byte_size > self.free_byte_size:
                return False
            self.used_byte_size += byte_size
            return True

    def give(self, byte_size: int) -> None:
        """Count bytes that are not pinned any more."""
        with self._lock:
            self.used_byte_size -= byte_size
            assert self.used_byte_size >= 0, "more pinned memory was given back than taken"


class _Uses(msgspec.Struct):
    """A region that copies were made from or to."""

    byte_size: int
    #: Since it was last decided about.
    count: int = 0
    #: The number of the last use, among the uses of all regions.
    last: int = 0
    pinned: bool = False
    #: Whether it is the worker's or the kernel's: it is never unpinned for another one.
    stays: bool = False
    refused: bool = False


class PinningPolicy:
    """Decides which regions are pinned. Not thread-safe."""

    def __init__(self, limit_byte_size: int) -> None:
        #: The rest is for arenas, and for the block in which batches are gathered.
        self._largest = limit_byte_size // 2
        self._regions: dict[int, _Uses] = {}
        self._use_count = 0
        #: Whether nothing can be pinned on this machine.
        self.stopped = False

    def used(self, number: int, byte_size: int, free_byte_size: int, *, stays: bool) -> Optional[list[int]]:  # noqa: UP045 - Python 3.9
        """Count a use of a region. Returns None, or if it is to be pinned now the regions to unpin before.

        With `stays` it is an arena, which is pinned with its first use. `free_byte_size` is what is left of the budget.
        """
        self._use_count += 1
        found = self._regions.get(number)
        if found is None:
            found = self._regions[number] = _Uses(byte_size, stays=stays)
        found.last = self._use_count
        if found.pinned or found.refused or self.stopped:
            return None
        found.count += 1
        if not stays and (found.count < MIN_USES or not MIN_REGION_BYTE_SIZE <= byte_size <= self._largest):
            return None
        found.count = 0
        unpinned = self._idle(byte_size - free_byte_size, IDLE_USES)
        if unpinned is None:
            return None
        found.pinned = True
        return unpinned

    def make_room(self, byte_size: int) -> list[int]:
        """Return clients' regions to unpin, the longest unused first: together they have at least `byte_size` bytes.

        Empty if all of them have fewer.
        """
        return self._idle(byte_size, 0) or []

    def _idle(self, byte_size: int, least_idle: int) -> Optional[list[int]]:  # noqa: UP045 - as above
        """Mark as not pinned the regions that are longest unused, `byte_size` bytes together, and return them.

        Only those that were not used during `least_idle` uses of others. None if these have fewer bytes.
        """
        chosen: list[int] = []
        pinned = [(uses.last, number) for number, uses in self._regions.items() if uses.pinned and not uses.stays]
        for last, number in sorted(pinned):
            if byte_size <= 0 or self._use_count - last < least_idle:
                break
            chosen.append(number)
            byte_size -= self._regions[number].byte_size
        if byte_size > 0:
            return None
        for number in chosen:
            self._regions[number].pinned = False
        return chosen

    def not_pinned(self, number: int, *, ever: bool) -> None:
        """Note that a region was not pinned: there was no room for it, or, without `ever`, it can never be pinned."""
        found = self._regions.get(number)
        if found is not None:
            found.pinned, found.count, found.refused = False, 0, not ever

    def gone(self, number: int) -> bool:
        """Forget a region. Returns whether it is pinned, or is to be."""
        found = self._regions.pop(number, None)
        return found is not None and found.pinned
