"""What a batch has on the device while it is in flight: the memory that it is gathered in, what it reads and writes,
and events at the ends of its stages.

An instance has two of these, in turn, so that it can enqueue a batch while the one before is computed.

Fetches small outputs of a batch from the device together: rows that lie side by side in one copy, all in one wait.

A copy to memory of the host that is not pinned waits for the stream, so a batch of 32 classifiers would wait 32 times.
"""

from __future__ import annotations

import ctypes
import logging
import time
from typing import TYPE_CHECKING, Any

from backends.worker.devices.staging import Staging
from shm.arrays import address_of
from shm.cuda import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.devices.pinning_policy import PinnedBudget
    from backends.worker.devices.staging import StagingLimits
    from backends.worker.devices.tensors import DeviceArray
    from shm.cuda import Cuda

logger = logging.getLogger(__name__)

#: The most bytes that are fetched together. What is more of a batch is copied from where it is.
MAX_BYTE_SIZE = 1 << 20

#: Bytes between two outputs that are copied with them: a call takes longer.
_MAX_GAP = 512


class JoinedCopy:
    """Outputs that one copy fetches: `byte_size` bytes from `source` on the device to `offset` in the pinned block."""

    __slots__ = ("byte_size", "offset", "source")

    def __init__(self, source: int, offset: int, byte_size: int) -> None:
        self.source = source
        self.offset = offset
        self.byte_size = byte_size


def joined(places: Sequence[tuple[int, int, int]]) -> tuple[list[JoinedCopy], list[int]]:
    """Return the copies that fetch all `places` (memory, address and bytes), and the offset of each in the block. Pure.

    No copy reaches from one memory into another, which begins a few bytes later perhaps: CUDA does not say that a copy
    across two allocations works.
    """
    runs: list[JoinedCopy] = []
    last_memory = 0
    offsets = [0] * len(places)
    position = 0
    for index in sorted(range(len(places)), key=places.__getitem__):
        memory, address, byte_size = places[index]
        last = runs[-1] if runs else None
        if last is None or memory != last_memory or address > last.source + last.byte_size + _MAX_GAP:
            last = JoinedCopy(address, position, 0)
            runs.append(last)
            last_memory = memory
        offsets[index] = last.offset + address - last.source
        last.byte_size = max(last.byte_size, address + byte_size - last.source)
        position = last.offset + last.byte_size
    return runs, offsets


class SmallOutputs:
    """The small outputs of the batch in execution. Guarded by the lock of the device."""

    def __init__(self, cuda: Cuda, budget: PinnedBudget) -> None:
        """`budget` is what the instance may pin."""
        self._cuda = cuda
        self._budget = budget
        #: The output on the device, and the bytes of the response that get it.
        self._waiting: list[tuple[DeviceArray, bytearray]] = []
        self._byte_size = 0
        self._pinned_address = 0
        self._pinned_byte_size = 0
        self._pins = True

    def add(self, array: DeviceArray, data: bytearray) -> bool:
        """Fetch an output with the next wait; `data` has its size. Returns False if there is no room for more."""
        if self._byte_size + len(data) > MAX_BYTE_SIZE:
            return False
        self._waiting.append((array, data))
        self._byte_size += len(data)
        return True

    def enqueue(self, copy: Callable[[int, int, int], None]) -> Callable[[], None] | None:
        """Enqueue the copies of all outputs; None if there are none.

        `copy` enqueues a copy: target, source and bytes. The caller waits for the stream, then calls what is returned.
        """
        if not self._waiting:
            return None
        waiting, self._waiting, self._byte_size = self._waiting, [], 0
        runs, offsets = joined([(_memory_of(array), array.address, len(data)) for array, data in waiting])
        if not self._grow(runs[-1].offset + runs[-1].byte_size):
            for array, data in waiting:
                copy(address_of(memoryview(data)), array.address, len(data))
            return lambda: waiting.clear()
        for run in runs:
            copy(self._pinned_address + run.offset, run.source, run.byte_size)
        start = self._pinned_address

        def distribute() -> None:
            for (_, data), offset in zip(waiting, offsets):
                data[:] = ctypes.string_at(start + offset, len(data))
            waiting.clear()

        return distribute

    def close(self) -> None:
        """Free the memory. Raises `CudaError`."""
        if self._pinned_address:
            self._cuda.free_pinned(self._pinned_address)
            self._pinned_address = self._pinned_byte_size = 0

    def _grow(self, byte_size: int) -> bool:
        """Return whether the pinned block has this size. Allocates a larger one if it can; nothing is being copied."""
        if byte_size <= self._pinned_byte_size:
            return True
        wanted = 1 << max(byte_size - 1, (64 << 10) - 1).bit_length()
        if not self._pins or not self._budget.take(wanted - self._pinned_byte_size):
            return False
        cuda = self._cuda
        try:
            if self._pinned_address:
                cuda.free_pinned(self._pinned_address)
                self._pinned_address = 0
            self._pinned_address = cuda.allocate_pinned(wanted)
        except CudaError as error:  # no memory may be locked, for example: copies take longer, and work
            logger.warning("%d bytes of pinned memory cannot be allocated for outputs: %s", wanted, error)
            self._budget.give(wanted)
            self._pinned_byte_size, self._pins = 0, False
            return False
        self._pinned_byte_size = wanted
        return True


def _memory_of(array: DeviceArray) -> int:
    """Return the same number for arrays in one piece of memory. Parts of an array have its owner."""
    return array.address if array.owner is None else id(array.owner)


class BatchOnDevice:
    """The memory and the events of one batch at a time. Guarded by the lock of the device."""

    def __init__(self, device: InstanceDevice, limits: StagingLimits) -> None:
        self.staging = Staging(device, limits)
        self.small_outputs = SmallOutputs(device.cuda, device.pinned_budget)
        #: Memory that something enqueued reads or writes.
        self.kept: list[object] = []
        self._device = device
        #: Reached when the inputs are copied, when the outputs are computed, and when these are copied. They note the
        #: time. Made when they are first needed.
        self._events: tuple[Any, Any, Any] | None = None
        #: Whether inputs are copied, and whether outputs are.
        self.copies_in = self.copies_out = False
        #: Whether the second event stands behind all that is computed.
        self.is_marked = False

    @property
    def events(self) -> tuple[Any, Any, Any]:
        """The three events. Raises `CudaError`."""
        if self._events is None:
            cuda, device_id = self._device.cuda, self._device.device_id
            first, second, third = (cuda.new_timed_event(device_id) for _ in range(3))
            self._events = first, second, third
        return self._events

    def stages(self) -> Stages:
        """Return when the stages of the batch have ended, which is over, and begin with another one.

        Raises `CudaError`.
        """
        copied, computed, ended = self.events
        elapsed_ns = self._device.cuda.elapsed_ns
        output_ns = elapsed_ns(computed, ended) if self.copies_out and self.is_marked else 0
        found = Stages(elapsed_ns(copied, ended) if self.copies_in else None, max(0, output_ns))
        self.forget_stages()
        return found

    def close(self) -> None:
        """Free the pinned memory and the events. Raises `CudaError`."""
        self.kept.clear()
        self.staging.close()
        self.small_outputs.close()
        events, self._events = self._events, None
        self._device.cuda.destroy([], events or ())

    def forget_stages(self) -> None:
        """Begin with another batch."""
        self.copies_in = self.copies_out = self.is_marked = False


class Stages:
    """How long before the end of a batch its other stages have ended, in nanoseconds of the device."""

    __slots__ = ("input_ns", "output_ns")

    def __init__(self, input_ns: int | None, output_ns: int) -> None:
        """`input_ns` is None for a batch whose inputs were on the device already."""
        self.input_ns = input_ns
        self.output_ns = output_ns


class EnqueuedBatch:
    """A batch that is enqueued as a whole, with its copies."""

    def __init__(self, wait: Callable[[], None], finish: Callable[[], Stages]) -> None:
        self._wait = wait
        self._finish = finish
        #: When `wait` has ended, in nanoseconds of the monotonic clock.
        self.ended_ns = 0

    def wait(self) -> None:
        """Wait until all of it is done. In any thread. The process ends if the device is lost."""
        self._wait()
        self.ended_ns = time.monotonic_ns()

    def finish(self) -> Stages:
        """Fill the small outputs, forget the memory, and return the stages. After `wait`, before the second batch that
        is enqueued after this one."""
        return self._finish()
