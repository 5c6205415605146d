"""What a batch has on the device while it is in flight: the memory that it is gathered in, what it reads and writes,
and events at the ends of its stages.

An instance has two of these, in turn, so that it can enqueue a batch while the one before is computed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from backends.worker.devices.small_outputs import SmallOutputs
from backends.worker.devices.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.devices.staging import StagingLimits


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
