"""Pins memory of the host that an instance on a GPU copies from and to: arenas, and regions of clients.

A thread of its own pins and unpins: a request never waits for it, and is copied from where it is in the meantime.
docs/decisions/gpu-workers.md says which memory may be pinned, and why its pages stay.
"""

from __future__ import annotations

import bisect
import logging
import mmap
import queue
import threading
from typing import TYPE_CHECKING

from backends.worker.devices.instance_device import end_if_lost
from backends.worker.devices.pinning_policy import PinningPolicy
from backends.worker.memory import AttachedRegion
from shm.arena import pinned_window
from shm.arrays import address_of
from shm.cuda import CudaError

if TYPE_CHECKING:
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.memory import AttachedRegions
    from backends.worker.output_memory import ArenaOutputs

logger = logging.getLogger(__name__)

#: Smaller copies go through the block in which batches are gathered: to copy them there takes less time than a call.
MIN_BYTE_SIZE = 64 << 10

#: Errors that say that this machine pins nothing, or no more: no memory, not permitted, not supported (cudaError_t).
_NEVER = frozenset({2, 800, 801})

#: How long a driver may take to unpin everything, in seconds.
_CLOSE_TIMEOUT_S = 10.0

#: The number of the worker's own arena, in this module. The kernel's numbers begin with 1.
_OWN_ARENA = 0


class _Mapping:
    """Memory of the host that may be pinned: all of a client's region, or the first bytes of an arena."""

    def __init__(self, number: int, view: memoryview, *, stays: bool) -> None:
        self.number = number
        start = address_of(view)
        #: Whole pages. What a client's region does not have of the first and the last one is its object's, too.
        self.start = start & -mmap.PAGESIZE
        self.byte_size = -(-(start + len(view)) // mmap.PAGESIZE) * mmap.PAGESIZE - self.start
        self.stays = stays
        self.pinned = False
        #: Keeps the memory mapped from when it is to be pinned until it is unpinned.
        self.kept: memoryview | None = None


class HostPinning:
    """What is pinned for one instance. Any thread may call."""

    def __init__(self, device: InstanceDevice, regions: AttachedRegions, outputs: ArenaOutputs) -> None:
        """`outputs` is the worker's own memory; its first pages stay from now on."""
        self._device = device
        self._regions = regions
        self._outputs = outputs
        self._budget = device.pinned_budget
        self._policy = PinningPolicy(self._budget.limit_byte_size)
        #: Guards what follows, and the policy.
        self._lock = threading.Lock()
        self._mappings: dict[int, _Mapping] = {}
        #: The same, by address, and the addresses.
        self._ordered: list[_Mapping] = []
        self._starts: list[int] = []
        #: Memory, and whether to pin or to unpin it; None ends the thread.
        self._jobs: queue.SimpleQueue[tuple[_Mapping, bool] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self._warned = False
        #: How often memory was pinned and unpinned.
        self.pins = self.unpins = 0
        outputs.keep_pages(pinned_window(self._budget.limit_byte_size))
        regions.on_end = self._ended

    # ---- copies --------------------------------------------------------------------------------------

    def used(self, address: int, byte_size: int) -> bool:
        """Count a copy from or to memory of the host. Returns whether the memory is pinned."""
        if byte_size < MIN_BYTE_SIZE:
            return False
        with self._lock:
            found = self._find(address, byte_size)
            if found is None:
                self._look()
                found = self._find(address, byte_size)
                if found is None:
                    return False
            unpinned = self._policy.used(found.number, found.byte_size, self._budget.free_byte_size, stays=found.stays)
            if unpinned is not None and self._keep(found):
                self._unpin(unpinned)
                self._begin(found, pin=True)
            return found.pinned

    def reach(self, address: int, byte_size: int) -> int:
        """Return how many of these bytes one copy may have: CUDA takes no memory of which only a part is pinned.

        An arena has such a border where the pages begin that do not stay. It counts also before it is pinned: that may
        happen at any time.
        """
        with self._lock:
            position = bisect.bisect_right(self._starts, address)
            if position:
                before = self._ordered[position - 1]
                end = before.start + before.byte_size
                if address < end:
                    return min(byte_size, end - address)
            if position < len(self._starts):
                return min(byte_size, self._starts[position] - address)
            return byte_size

    def make_room(self, byte_size: int) -> None:
        """Let the thread unpin regions of clients, until `byte_size` bytes can be pinned for something else."""
        with self._lock:
            self._unpin(self._policy.make_room(byte_size - self._budget.free_byte_size))

    def close(self) -> None:
        """Unpin everything, for a process that goes on. No copy may be made any more."""
        with self._lock:
            self._regions.on_end = None
            self._policy.stopped = True
            for mapping in self._ordered:
                if self._policy.gone(mapping.number):
                    self._begin(mapping, pin=False)
        if self.thread is not None:
            self._jobs.put(None)
            self.thread.join(_CLOSE_TIMEOUT_S)

    def _find(self, address: int, byte_size: int) -> _Mapping | None:
        position = bisect.bisect_right(self._starts, address) - 1
        if position < 0:
            return None
        found = self._ordered[position]
        return found if address + byte_size <= found.start + found.byte_size else None

    def _look(self) -> None:
        """Note what was mapped since the last time."""
        views = {region.number: (region.pinnable, not region.volatile) for region in self._pinnable()}
        if self._outputs.arena is not None:
            region = self._outputs.arena.region
            views[_OWN_ARENA] = region.view(0, region.steady_byte_size), True
        for number, (view, stays) in views.items():
            if view is not None and len(view) >= MIN_BYTE_SIZE and number not in self._mappings:
                self._mappings[number] = _Mapping(number, view, stays=stays)
        self._order()

    def _pinnable(self) -> list[AttachedRegion]:
        return [region for region in self._regions if isinstance(region, AttachedRegion)]

    def _order(self) -> None:
        self._ordered = sorted(self._mappings.values(), key=lambda mapping: mapping.start)
        self._starts = [mapping.start for mapping in self._ordered]

    # ---- regions that go -----------------------------------------------------------------------------

    def _ended(self, number: int) -> None:
        with self._lock:
            found = self._mappings.pop(number, None)
            pinned = self._policy.gone(number)
            if found is None:
                return
            self._order()
            if pinned:
                self._begin(found, pin=False)

    def _unpin(self, numbers: list[int]) -> None:
        for number in numbers:
            self._begin(self._mappings[number], pin=False)

    def _keep(self, mapping: _Mapping) -> bool:
        """Let the memory stay mapped. Returns False if its region is about to go."""
        if mapping.number == _OWN_ARENA:
            assert self._outputs.arena is not None, "a copy to an arena that is not there"
            region_of_outputs = self._outputs.arena.region
            mapping.kept = region_of_outputs.view(0, region_of_outputs.steady_byte_size)
            return True
        region = self._regions.find(mapping.number)
        mapping.kept = region.pinnable if isinstance(region, AttachedRegion) else None
        return mapping.kept is not None

    # ---- the thread ----------------------------------------------------------------------------------

    def _begin(self, mapping: _Mapping, *, pin: bool) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="pinning", daemon=True)
            self.thread.start()
        self._jobs.put((mapping, pin))

    def _run(self) -> None:
        try:
            self._device.cuda.use(self._device.device_id)
        except CudaError as error:  # another thread will say it, too
            end_if_lost(error)
        while (job := self._jobs.get()) is not None:
            mapping, pin = job
            if pin:
                self._pin_now(mapping)
            else:
                self._unpin_now(mapping)
            del job, mapping

    def _pin_now(self, mapping: _Mapping) -> None:
        if not self._budget.take(mapping.byte_size):
            self._not_pinned(mapping, ever=True)
            return
        try:
            self._device.cuda.pin(mapping.start, mapping.byte_size)
        except CudaError as error:
            end_if_lost(error)
            self._budget.give(mapping.byte_size)
            self._not_pinned(mapping, ever=False)
            self._explain(mapping, error)
            return
        mapping.pinned = True
        self.pins += 1

    def _not_pinned(self, mapping: _Mapping, *, ever: bool) -> None:
        mapping.kept = None
        with self._lock:
            if self._mappings.get(mapping.number) is mapping:
                self._policy.not_pinned(mapping.number, ever=ever)

    def _explain(self, mapping: _Mapping, error: CudaError) -> None:
        """Log the first failure: the worker goes on, and all of them cost only time."""
        if error.code in _NEVER:
            with self._lock:
                self._policy.stopped = True
        if not self._warned:
            self._warned = True
            logger.warning(
                "%d bytes of shared memory cannot be pinned, and are copied without: %s", mapping.byte_size, error
            )

    def _unpin_now(self, mapping: _Mapping) -> None:
        if not mapping.pinned:  # it could not be pinned
            mapping.kept = None
            return
        mapping.pinned = False
        try:
            self._device.unpin(mapping.start)
        except CudaError as error:
            end_if_lost(error)
            logger.warning("shared memory cannot be unpinned: %s", error)
        self._budget.give(mapping.byte_size)
        mapping.kept = None
        self.unpins += 1
