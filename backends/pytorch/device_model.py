"""A loaded PyTorch model on a GPU: tensors are made over the memory where inputs are, and outputs stay on the GPU.

All of it is enqueued on the stream of the instance, which is PyTorch's current stream meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.pytorch.conversion import TORCH_TYPES
from backends.pytorch.model import TorchModel
from backends.worker.devices.tensors import DeviceArray
from backends.worker.sequence_config import state_outputs
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from backends.base import Config, Timings
    from backends.pytorch.conversion import TensorConversion
    from backends.pytorch.model_file import Runner
    from backends.pytorch.naming import Places
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.request import WorkerRequest


class DeviceConversion:
    """Makes tensors over memory of a device, and the other way round; without copies."""

    def __init__(self, torch: Any, device: InstanceDevice, *, copies: bool) -> None:
        """`copies`: the model may change its inputs, which may be memory of clients."""
        self._torch = torch
        self._copies = copies
        self.device = device
        self._name = f"cuda:{device.device_id}"
        self._stream = torch.cuda.ExternalStream(device.stream, device=self._name)

    def current_stream(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes the instance's stream the current one of PyTorch."""
        context: AbstractContextManager[Any] = self._torch.cuda.stream(self._stream)
        return context

    def tensor(self, array: DeviceArray) -> Any:
        """Return a tensor over the memory of `array`, which the caller keeps as long as the tensor is used."""
        dtype = getattr(self._torch, TORCH_TYPES[array.datatype])
        if not element_count(array.shape):
            return self._torch.empty(array.shape, dtype=dtype, device=self._name)
        tensor = self._torch.as_tensor(_ArrayInterface(array), device=self._name)
        if array.datatype == "BF16":
            tensor = tensor.view(dtype)
        return tensor.clone() if self._copies else tensor

    def array(self, tensor: Any, datatype: str) -> DeviceArray | None:
        """Return the memory of an output, which keeps the tensor; None if the tensor is not on the device."""
        if not tensor.is_cuda or tensor.device.index != self.device.device_id:
            return None
        tensor = tensor.detach().resolve_neg().contiguous()
        return DeviceArray(tensor.data_ptr(), datatype, tuple(tensor.shape), self.device.device_id, tensor)


class _ArrayInterface:
    """Describes memory of a device in the way of Numba, which PyTorch reads. BF16, which it lacks, is int16."""

    def __init__(self, array: DeviceArray) -> None:
        typestr = "<i2" if array.datatype == "BF16" else DATATYPES[array.datatype].numpy
        self.__cuda_array_interface__ = {
            "shape": array.shape, "typestr": typestr, "data": (array.address, False), "version": 2,
        }  # fmt: skip


class DeviceTorchModel(TorchModel):
    """A model in memory of a GPU, with the tensors of its configuration."""

    def __init__(
        self,
        config: Config,
        runner: Runner,
        places: Places,
        conversion: TensorConversion,
        guard: Callable[[], AbstractContextManager[Any]],
        on_device: DeviceConversion,
    ) -> None:
        super().__init__(config, runner, places, conversion, guard, on_device.device)
        self._on_device = on_device
        #: The worker keeps implicit state on the host.
        self._states = {spec.name for spec in state_outputs(config)}

    def _infer(self, requests: Sequence[WorkerRequest], sizes: Sequence[int], timings: Timings) -> dict[str, Any]:
        with self._on_device.current_stream():
            return super()._infer(requests, sizes, timings)

    def _tensors(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        device = self._on_device.device
        device.keep(arrays)
        # A model may return a buffer of its own, which its next run changes.
        device.keeps_outputs_in_order()
        strings = {name: array for name, array in arrays.items() if name in self._string_inputs}
        on_device = {name: self._on_device.tensor(array) for name, array in arrays.items() if name not in strings}
        return on_device | super()._tensors(strings)

    def _failed(self) -> None:
        self._on_device.device.synchronize()  # ends the process if the device is lost

    def _array(self, name: str, result: Any, datatype: str) -> Any:
        self._on_device.device.computes()
        if datatype != "BYTES" and name not in self._states:
            array = self._on_device.array(result, datatype)
            if array is not None:
                return array
        return super()._array(name, result, datatype)
