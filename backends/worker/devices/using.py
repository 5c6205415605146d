"""Makes the device of an instance, and lets its tensors be there. The worker imports it only for instances on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.worker.devices.device_tensors import DeviceOutputs, device_input
from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.pinning import HostPinning
from backends.worker.devices.staging import StagingLimits
from backends.worker.output_memory import ArenaOutputs
from kernel.errors import Unavailable
from shm.cuda import CudaUnavailable, cuda

if TYPE_CHECKING:
    from backends.base import Backend
    from backends.transport import wire
    from backends.worker.inputs import InputReader
    from backends.worker.memory import AttachedRegions
    from backends.worker.output_memory import OutputMemory


def instance_device(load: wire.Load, regions: AttachedRegions) -> InstanceDevice:
    """Return the device of the instance of this worker. Raises `Unavailable`, which says what is missing."""
    limits = StagingLimits(load.pinned_byte_size, load.device_pool_byte_size)
    try:
        return InstanceDevice(cuda(), load.device_id, regions, limits)
    except CudaUnavailable as error:
        raise Unavailable(f"GPU {load.device_id} cannot be used: {error}") from None


def use_device(
    device: InstanceDevice,
    regions: AttachedRegions,
    inputs: InputReader,
    backend: Backend,
    memory: OutputMemory,
    *,
    waits_at_once: bool,
) -> DeviceOutputs:
    """Let the backend get inputs on the device if it takes them, and return what writes its outputs there.

    Shared memory is pinned from now on, also that of the worker's own outputs, `memory`.
    """
    if device.pinned_budget.limit_byte_size and isinstance(memory, ArenaOutputs):
        device.pinning = HostPinning(device, regions, memory)
    if backend.device_inputs:
        inputs.on_device = device_input
    return DeviceOutputs(device, regions, waits_at_once=waits_at_once)
