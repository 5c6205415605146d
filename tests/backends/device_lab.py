"""A lab whose backend has a GPU: that of `tests/fake_cuda`, on which everything happens late."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.staging import StagingLimits
from backends.worker.devices.tensors import DeviceArray, DeviceInput
from shm.arrays import datatype_of
from shm.cuda import Cuda, DeviceMemory
from tests.backends.conftest import Lab
from tests.fake_cuda import driver, memory, runtime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.worker.request import OutputValue, WorkerRequest
    from shm.arrays import Array


class DeviceLab(Lab):
    """Waits for the stream before it reads outputs, as the worker does."""

    def __init__(self) -> None:
        super().__init__()
        self.instance_device = InstanceDevice(Cuda(runtime, driver), 0, self, StagingLimits(1 << 20))  # type: ignore[arg-type]  # `find`
        #: Memory of clients for outputs: name → address and size.
        self.regions: dict[int, tuple[int, int]] = {}
        #: The outputs of all responses, as the backend gave them.
        self.given: dict[str, Any] = {}

    @property
    def device(self) -> InstanceDevice:  # type: ignore[override]
        """See `Host`."""
        return self.instance_device

    def find(self, number: int) -> Any:
        """Return a region, as `AttachedRegions` does."""
        found = self.regions.get(number)
        return None if found is None else _Region(*found)

    def on_device(self, array: Array) -> int:
        """Return the address of a copy of `array` in memory of a client."""
        address = memory.allocate(array.nbytes, 0)
        ctypes.memmove(address, array.ctypes.data, array.nbytes)
        return address

    def device_input(self, name: str, array: Array) -> DeviceInput:
        """Return an input in a region of a client."""
        address, datatype = self.on_device(array), datatype_of(array)
        assert datatype is not None
        place = DeviceArray(address, datatype, array.shape, 0)
        return DeviceInput(name, place, lambda: memoryview(ctypes.string_at(address, array.nbytes)))

    def respond(
        self,
        request: WorkerRequest,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool],
        final: bool,
    ) -> None:
        for output in outputs:
            self.given[output.name] = output.array
            if isinstance(output.array, DeviceArray):
                output.array = self.instance_device.to_host(output.array)
        super().respond(request, outputs, parameters, final)


class _Region:
    def __init__(self, address: int, byte_size: int) -> None:
        self._memory = DeviceMemory(address, byte_size, 0)

    def device_memory(self) -> DeviceMemory:
        return self._memory


def at(address: int, shape: Sequence[int]) -> Array:
    """Return floats at an address."""
    data = ctypes.string_at(address, 4 * int(np.prod(shape)))
    return np.frombuffer(data, np.float32).reshape(shape)
