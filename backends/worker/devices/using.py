"""Makes the device of an instance, and lets its tensors be there. The worker imports it only for instances on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.worker.devices.device_arenas import DeviceArenas
from backends.worker.devices.device_tensors import DeviceInputs, DeviceOutputs
from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.pinning import HostPinning
from backends.worker.devices.staging import StagingLimits
from backends.worker.output_memory import ArenaOutputs
from kernel.errors import Unavailable
from shm.cuda import CudaUnavailable, cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.transport import wire
    from backends.worker.held_inputs import HeldInputs
    from backends.worker.memory import AttachedRegions
    from backends.worker.output_memory import OutputMemory


def instance_device(load: wire.Load, regions: AttachedRegions) -> InstanceDevice:
    """Return the device of the instance of this worker, which is not open yet.

    Raises `Unavailable`, which says what is missing.
    """
    limits = StagingLimits(load.pinned_byte_size, load.device_pool_byte_size)
    try:
        return InstanceDevice(cuda(), load.device_id, regions, limits, late=True)
    except CudaUnavailable as error:
        raise Unavailable(f"GPU {load.device_id} cannot be used: {error}") from None


class DeviceTensors:
    """What a worker needs so that its tensors can be on its device."""

    def __init__(
        self,
        device: InstanceDevice,
        regions: AttachedRegions,
        held: HeldInputs,
        memory: OutputMemory,
        *,
        waits_at_once: bool,
        announce: Callable[[wire.DeviceArenaCreated], None] | None,
        count_memory: Callable[[str, int, int], None],
    ) -> None:
        """`announce` tells the kernel of arenas on the device; None if the worker shares no memory with others.

        `count_memory` gets the kind of memory, the number of the device and the bytes that are kept between batches.
        Shared memory is pinned from now on, also that of the worker's own outputs, `memory`.
        """
        if device.pinned_budget.limit_byte_size and isinstance(memory, ArenaOutputs):
            device.pinning = HostPinning(device, regions, memory)
        if waits_at_once:
            device.poll_ns = 0  # batches overlap in threads, which would wait for the interpreter's lock
        self.inputs = DeviceInputs(device, held)
        device.on_pooled = lambda byte_size: count_memory("GPU", device.device_id, byte_size)
        self.arenas = device.arenas = None if announce is None else DeviceArenas(device, announce)
        self.outputs = DeviceOutputs(device, regions, waits_at_once=waits_at_once, arenas=self.arenas)
