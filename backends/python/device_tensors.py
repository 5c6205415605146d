"""`pb_utils.Tensor` in memory of a GPU. Only workers of instances on a GPU import this module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from backends.python import device_dlpack, dlpack
from backends.python.failures import TritonModelException
from backends.python.tensors import Tensor
from backends.worker.devices.tensors import DeviceArray, DeviceInput
from backends.worker.request import OutputValue
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.python.instance import PythonInstance
    from backends.python.request_arguments import PreferredMemory
    from backends.worker.devices.instance_device import InstanceDevice
    from shm.arrays import Array
    from shm.tensor import Tensor as ReceivedTensor

_IN_GPU = "Tensor is stored in GPU and cannot be converted to NumPy."


class GpuTensor(Tensor):
    """A tensor in memory of a GPU. `as_numpy` does not work, as in Triton; DLPack does."""

    __slots__ = ("_device", "_on_device")

    _device: InstanceDevice
    _on_device: DeviceArray

    @classmethod
    def of(cls, name: str, array: DeviceArray, device: InstanceDevice) -> GpuTensor:
        """Return a tensor over `array`, which it keeps."""
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._datatype = array.datatype
        tensor._array = None
        tensor._view = None
        tensor._writable = False
        tensor._device = device
        tensor._on_device = array
        return tensor

    def as_numpy(self) -> NoReturn:
        raise TritonModelException(_IN_GPU)

    def shape(self) -> list[int]:
        return list(self._on_device.shape)

    def is_cpu(self) -> bool:
        return False

    def __dlpack__(
        self,
        stream: Any = None,
        *,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a DLPack capsule for a consumer that uses `stream`, as `Tensor.__dlpack__`.

        A consumer may ask for a copy in CPU memory with `dl_device`. Raises BufferError for another device.
        """
        array = self._on_device
        if dl_device is not None and tuple(dl_device) == dlpack.CPU_DEVICE and copy is not False:
            return dlpack.to_capsule(self._device.to_host(array), bfloat=self._datatype == "BF16")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"tensor '{self._name}' is on GPU {array.device_id}, not on device {tuple(dl_device)}")
        if copy:
            block = self._device.allocate(array.nbytes)
            self._device.enqueue(block.address, array.address, array.nbytes, array.owner, crosses=False)
            array = DeviceArray(block.address, array.datatype, array.shape, array.device_id, block)
        return device_dlpack.to_capsule(array, self._device, stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return device_dlpack.CUDA, self._on_device.device_id

    def output(self) -> OutputValue:
        return OutputValue(self._name, self._datatype, self._on_device)

    def _elements(self) -> Array:
        raise TritonModelException(_IN_GPU)


def _moved(view: ReceivedTensor, device: InstanceDevice) -> Any:
    """Return a result on the device of the instance. BYTES and what has no elements stay on the host."""
    if isinstance(view, DeviceInput):
        if view.device_id == device.device_id or not view.byte_size:
            return view
        block = device.allocate(view.byte_size)
        device.enqueue(block.address, view.address, view.byte_size, (view.array.owner, block))
        array = DeviceArray(block.address, view.datatype, view.shape, device.device_id, block)
    elif view.datatype == "BYTES" or not view.byte_size:
        return view
    else:
        assert view.data is not None, "a result without bytes"
        array = device.upload(view.data, view.datatype, view.shape)
    device.synchronize()  # the result may be released, and its memory be written, as soon as nothing refers to it
    return DeviceInput(view.name, array, lambda: device.to_host(array).reshape(-1).view("u1").data)


# What models and their logs see is Triton's class.
GpuTensor.__name__ = GpuTensor.__qualname__ = "Tensor"


def use_gpu(instance: PythonInstance, device: InstanceDevice) -> None:
    """Let the tensors of the instance be on its GPU: inputs where clients have them there, and DLPack tensors."""

    def received(views: Sequence[ReceivedTensor], writable: bool) -> list[Tensor]:
        return [
            GpuTensor.of(view.name, view.array, device) if isinstance(view, DeviceInput) else tensor
            for view, tensor in zip(views, Tensor.received(views, writable))
        ]

    def from_gpu(name: str, source: Any) -> Tensor | None:
        array = device_dlpack.from_source(source, device)
        return None if array is None else GpuTensor.of(name, array, device)

    def results(views: Sequence[ReceivedTensor], writable: bool, preferred: PreferredMemory | None) -> list[Tensor]:
        wanted = None if preferred is None else preferred.device_id
        if wanted is None:
            return received(views, writable)
        if not 0 <= wanted < device.cuda.device_count:
            raise InvalidArgument(f"preferred memory is on GPU {wanted}, and the server has {device.cuda.device_count}")
        if wanted == device.device_id:
            views = [_moved(view, device) for view in views]
        return received(views, writable)

    instance.received = received
    instance.results = results
    dlpack.from_gpu.append(from_gpu)
