"""Memory of the device that another worker has allocated, and the kernel has leased for this one.

The lease ends when nothing in this process refers to the memory any more, and nothing reads it on the device: the
worker that has it writes something else there then.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from backends.worker.held_inputs import WatchedInput
from kernel.errors import InternalError

if TYPE_CHECKING:
    from backends.worker.devices.device_memory import DeviceRegion, OpenedMemory
    from backends.worker.devices.instance_device import InstanceDevice
    from shm.tensor import Span

logger = logging.getLogger(__name__)


class LeasedMemory:
    """The owner of the arrays over one tensor: as long as it lives, the tensor is leased and its memory open."""

    __slots__ = ("__weakref__", "_memory", "readers")

    def __init__(self, memory: OpenedMemory) -> None:
        self._memory = memory
        #: The streams on which libraries may read it, as `__dlpack__` numbers them.
        self.readers: set[int] = set()


class WatchedMemory(WatchedInput):
    """Knows whether a `LeasedMemory` still lives."""

    __slots__ = ("_device", "_readers")

    def __init__(self, region: DeviceRegion, span: Span, owner: LeasedMemory, device: InstanceDevice) -> None:
        super().__init__(region, span.offset, span.byte_size, owner)
        self._device = device
        # Not the owner: it could not be freed.
        self._readers = owner.readers

    def end(self) -> None:
        """Nothing refers to the memory any more: wait until what libraries have enqueued has read it.

        What this worker has enqueued itself has referred to the memory until it was done.
        """
        if self._readers:
            try:
                self._device.finish_readers(self._readers)
            except InternalError as error:  # the device works no more as it should: the next request says so
                logger.warning("a tensor of another model is released: %s", error.message)
