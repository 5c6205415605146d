"""Inputs and outputs of requests on the device of the instance, between the regions of clients and the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.worker.devices.device_memory import DeviceRegion
from backends.worker.devices.tensors import DeviceArray, DeviceInput
from backends.worker.inputs import is_aligned
from backends.worker.outputs import check_fits
from kernel.errors import InvalidArgument
from shm.arena import INLINE_LIMIT
from shm.datatypes import DATATYPES, element_count
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.memory import AttachedRegions, WorkerRegion
    from backends.worker.outputs import OutputWriter
    from shm.arrays import Array
    from shm.tensor import RequestedOutput


def device_input(tensor: Tensor, span: Span, region: WorkerRegion) -> Any:
    """Return an input in a region on a device, without a copy; None for others. Raises `InvalidArgument`.

    BYTES and misaligned elements are read on the host.
    """
    if not isinstance(region, DeviceRegion) or tensor.datatype == "BYTES" or not is_aligned(tensor, span):
        return None
    if element_count(tensor.shape) * DATATYPES[tensor.datatype].byte_size != span.byte_size:
        raise InvalidArgument(
            f"input '{tensor.name}' of shape {tensor.shape} does not have the {span.byte_size} bytes of its place"
        )
    opened = region.device_memory()
    array = DeviceArray(opened.address + span.offset, tensor.datatype, tensor.shape, opened.device_id, opened)
    return DeviceInput(tensor.name, array, lambda: region.view(span.offset, span.byte_size))


class DeviceOutputs:
    """Writes outputs that are on the device. What it enqueues is done after `InstanceDevice.synchronize`."""

    def __init__(self, device: InstanceDevice, regions: AttachedRegions, *, waits_at_once: bool) -> None:
        """With `waits_at_once` each output is complete when it is written: its bytes are sent, or batches overlap."""
        self._device = device
        self._regions = regions
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
        self._device.computes()
        if wanted is None and byte_size <= INLINE_LIMIT:
            data = bytearray(byte_size)
            self._device.copy_to(array, memoryview(data))
            return Tensor(name, datatype, shape, data)
        region = None if wanted is None else self._regions.find(wanted.lease.region_number)
        if wanted is not None and region is not None and not region.in_place:
            span = Span(wanted.lease, wanted.offset, byte_size)
            if isinstance(region, DeviceRegion):
                opened = region.device_memory()
                if opened.address + wanted.offset != array.address:  # not the place of `InstanceDevice.reserve`
                    self._device.enqueue(
                        opened.address + wanted.offset, array.address, byte_size, (opened, array.owner), crosses=False
                    )
                return Tensor(name, datatype, shape, None, span)
            region.write(wanted.offset, self.to_host(array).reshape(-1).view("u1").data)
            writer.count(byte_size)  # beside the copy from the device
            return Tensor(name, datatype, shape, None, span)
        tensor, view = writer.place(name, datatype, shape, byte_size, requested)
        self._device.copy_to(array, view)
        return tensor
