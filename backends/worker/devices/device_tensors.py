"""Inputs and outputs of requests on the device of the instance: between the backend, and the regions of clients and of
other workers.

Makes the device of an instance, and lets its tensors be there. The worker imports it only for instances on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.worker.devices.device_memory import DeviceArenas, DeviceRegion, LeasedMemory, WatchedMemory
from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.pinning import HostPinning
from backends.worker.devices.staging import CopyStage, StagingLimits
from backends.worker.devices.tensors import DeviceArray, DeviceInput
from backends.worker.inputs import is_aligned
from backends.worker.output_memory import ArenaOutputs
from backends.worker.outputs import check_fits
from kernel.errors import InvalidArgument, Unavailable
from shm.arena import INLINE_LIMIT
from shm.cuda import CudaUnavailable, cuda
from shm.datatypes import DATATYPES, element_count
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeGuard

    from backends.transport import wire
    from backends.worker.devices.device_memory import OpenedMemory
    from backends.worker.held_inputs import HeldInputs
    from backends.worker.memory import AttachedRegions, WorkerRegion
    from backends.worker.output_memory import OutputMemory
    from backends.worker.outputs import OutputWriter
    from shm.arrays import Array
    from shm.tensor import RequestedOutput


class DeviceInputs:
    """Makes tensors of what is in regions on devices, without copies. What other workers have allocated is watched."""

    def __init__(self, device: InstanceDevice, held: HeldInputs) -> None:
        self._device = device
        self._held = held

    def of_request(self, tensor: Tensor, span: Span, region: WorkerRegion, number: int) -> Any:
        """Return an input of request `number` in a region on a device; None for others. Raises `InvalidArgument`."""
        if not _is_on_device(region, tensor, span):
            return None
        if not region.of_worker:
            return _device_input(tensor, span, region, region.device_memory())
        owner = LeasedMemory(region.device_memory())
        found = _device_input(tensor, span, region, owner)
        self._held.watch_memory(number, WatchedMemory(region, span, owner, self._device))
        return found

    def of_result(self, tensor: Tensor, span: Span, region: WorkerRegion, lease: int) -> Any:
        """Return a result of a call in a region on a device, which is leased until nothing refers to it; None for
        others. Raises `InvalidArgument`; then the lease is released."""
        if not _is_on_device(region, tensor, span):
            return None
        try:
            owner = LeasedMemory(region.device_memory())
            found = _device_input(tensor, span, region, owner)
        except InvalidArgument:
            self._held.drop_result(lease)
            raise
        self._held.hold_memory(lease, WatchedMemory(region, span, owner, self._device))
        return found


def _is_on_device(region: WorkerRegion, tensor: Tensor, span: Span) -> TypeGuard[DeviceRegion]:
    """Whether a tensor can be used on a device. BYTES and misaligned elements are read on the host."""
    return isinstance(region, DeviceRegion) and tensor.datatype != "BYTES" and is_aligned(tensor, span)


def _device_input(tensor: Tensor, span: Span, region: DeviceRegion, owner: OpenedMemory | LeasedMemory) -> DeviceInput:
    if element_count(tensor.shape) * DATATYPES[tensor.datatype].byte_size != span.byte_size:
        raise InvalidArgument(
            f"input '{tensor.name}' of shape {tensor.shape} does not have the {span.byte_size} bytes of its place"
        )
    opened = region.device_memory()
    array = DeviceArray(opened.address + span.offset, tensor.datatype, tensor.shape, opened.device_id, owner)
    return DeviceInput(tensor.name, array, lambda: region.view(span.offset, span.byte_size))


class DeviceOutputs:
    """Writes outputs that are on the device. What it enqueues is done after `InstanceDevice.synchronize`."""

    def __init__(
        self,
        device: InstanceDevice,
        regions: AttachedRegions,
        *,
        waits_at_once: bool,
        arenas: DeviceArenas | None = None,
    ) -> None:
        """With `waits_at_once` each output is complete when it is written: its bytes are sent, or batches overlap.

        Outputs that may stay on the device are left in `arenas`; without them they go through the host.
        """
        self._device = device
        self._regions = regions
        self._arenas = arenas
        self.waits_at_once = waits_at_once

    @property
    def pending(self) -> bool:
        """Whether a response must wait: something is enqueued."""
        return self._device.pending

    def wait(self) -> None:
        """Wait for all that is enqueued."""
        self._device.synchronize()

    def to_host(self, array: DeviceArray) -> Array:
        """Return a copy on the host."""
        return self._device.to_host(array)

    def leave(self, name: str, datatype: str, array: DeviceArray) -> Tensor | None:
        """Enqueue the copy of a tensor to where other workers read it on the device; None if that cannot be done.

        Always a copy: who gets it may change it, and only this tensor is in its block.
        """
        byte_size = array.nbytes
        place = self._arenas.take(byte_size) if self._arenas is not None and byte_size else None
        if place is None:
            return None
        span, address = place
        self._device.computes()
        crosses = array.device_id != self._device.device_id
        self._device.enqueue(address, array.address, byte_size, array.owner, crosses=crosses, stage=CopyStage.OUTPUT)
        return Tensor(name, datatype, list(array.shape), None, span)

    def computed(self) -> None:
        """An output is computed where it stays, or will be when the stream is there."""
        self._device.computes()
        if self.waits_at_once:
            self.wait()

    def drop(self, span: Span) -> None:
        """Free a tensor of `leave` that is not sent."""
        assert self._arenas is not None, "a block in an arena that does not exist"
        self._arenas.drop(span)

    def write(
        self, writer: OutputWriter, name: str, datatype: str, array: DeviceArray, requested: RequestedOutput
    ) -> Tensor:
        """Enqueue the copy of an output to its place, and return its tensor. Raises `ServingError`."""
        tensor = self._write(writer, name, datatype, array, requested)
        if self.waits_at_once:
            self.wait()
        return tensor

    def _write(
        self, writer: OutputWriter, name: str, datatype: str, array: DeviceArray, requested: RequestedOutput
    ) -> Tensor:
        shape, byte_size, wanted = list(array.shape), array.nbytes, requested.span
        check_fits(name, byte_size, requested)
        if requested.on_device and wanted is None:
            left = self.leave(name, datatype, array)
            if left is not None:
                return left
        self._device.computes()
        if wanted is None and byte_size <= INLINE_LIMIT:
            data = bytearray(byte_size)
            self._device.fetch(array, data)
            return Tensor(name, datatype, shape, data)
        region = None if wanted is None else self._regions.find(wanted.lease.region_number)
        if wanted is not None and region is not None and not region.in_place:
            span = Span(wanted.lease, wanted.offset, byte_size)
            if isinstance(region, DeviceRegion):
                opened = region.device_memory()
                if opened.address + wanted.offset != array.address:  # not the place of `InstanceDevice.reserve`
                    crosses = opened.device_id != array.device_id
                    address, kept = opened.address + wanted.offset, (opened, array.owner)
                    self._device.enqueue(
                        address, array.address, byte_size, kept, crosses=crosses, stage=CopyStage.OUTPUT
                    )
                return Tensor(name, datatype, shape, None, span)
            region.write(wanted.offset, self.to_host(array).reshape(-1).view("u1").data)
            writer.count(byte_size)  # beside the copy from the device
            return Tensor(name, datatype, shape, None, span)
        tensor, view = writer.place(name, datatype, shape, byte_size, requested)
        self._device.copy_to(array, view)
        return tensor


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
        shares_arenas: bool,
        count_memory: Callable[[str, int, int], None],
    ) -> None:
        """`announce` tells the kernel of arenas on the device; None if the worker shares no memory with others. With
        `shares_arenas` it is one of several in its process.

        `count_memory` gets the kind of memory, the number of the device and the bytes that are kept between batches.
        Shared memory is pinned from now on, also that of the worker's own outputs, `memory`.
        """
        if device.pinned_budget.limit_byte_size and isinstance(memory, ArenaOutputs):
            device.pinning = HostPinning(device, regions, memory)
        if waits_at_once:
            device.poll_ns = 0  # batches overlap in threads, which would wait for the interpreter's lock
        self.inputs = DeviceInputs(device, held)
        device.on_pooled = lambda byte_size: count_memory("GPU", device.device_id, byte_size)
        self.arenas = device.arenas = None if announce is None else DeviceArenas(device, announce, shares=shares_arenas)
        self.outputs = DeviceOutputs(device, regions, waits_at_once=waits_at_once, arenas=self.arenas)
