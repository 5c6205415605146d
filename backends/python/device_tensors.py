"""`pb_utils.Tensor` in memory of a GPU. Only workers of instances on a GPU import this module.

DLPack capsules of memory on a CUDA device (dlpack.h), made and read with ctypes: no library of tensors is needed.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

from backends.python import dlpack
from backends.python.failures import TritonModelException
from backends.python.tensors import Tensor
from backends.worker.devices.tensors import DeviceArray, DeviceInput
from backends.worker.request import OutputValue
from kernel.errors import InvalidArgument
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.python.instance import PythonInstance
    from backends.python.requests import PreferredMemory
    from backends.worker.devices.instance_device import InstanceDevice
    from shm.arrays import Array
    from shm.tensor import Tensor as ReceivedTensor

#: kDLCUDA. Pinned memory of the host (kDLCUDAHost) and managed memory have other numbers.
CUDA = 2

#: (DLDataTypeCode, bits) → datatype: signed, unsigned, float, bfloat, bool.
_DATATYPES = {
    (0, 8): "INT8", (0, 16): "INT16", (0, 32): "INT32", (0, 64): "INT64",
    (1, 8): "UINT8", (1, 16): "UINT16", (1, 32): "UINT32", (1, 64): "UINT64",
    (2, 16): "FP16", (2, 32): "FP32", (2, 64): "FP64", (4, 16): "BF16", (6, 8): "BOOL",
}  # fmt: skip

DLPACK_CODES = {datatype: code for code, datatype in _DATATYPES.items()}

#: Streams as `__dlpack__` names them: the legacy default stream, the per-thread one, and none to wait for.
_LEGACY, _NO_WAIT = 1, -1


class _DlTensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DlManagedTensor(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _DlTensor), ("context", ctypes.c_void_p), ("deleter", _DELETER))


_api = ctypes.pythonapi


def _prototype(name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(_api, name)
    return ctypes.PYFUNCTYPE(result, *arguments)((name, _api)) if function is not None else None


_DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_new = _prototype("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR)

_set_name = _prototype("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)

_pointer = _prototype("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)

_is_valid = _prototype("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)

# The same for a capsule that is being freed: a Python object of it would count references again.
_freed_is_valid = _prototype("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)

_freed_pointer = _prototype("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)

_NAME, _USED = ctypes.c_char_p(b"dltensor"), ctypes.c_char_p(b"used_dltensor")

#: By address: the structures that consumers have, with their shapes and the memory.
_exported: dict[int, tuple[_DlManagedTensor, Any, DeviceArray]] = {}


def _deleted(address: int) -> None:
    """The consumer needs the memory no more."""
    _exported.pop(address, None)


def _freed(capsule: int) -> None:
    if _freed_is_valid(capsule, _NAME):  # nobody has consumed it
        _exported.pop(_freed_pointer(capsule, _NAME), None)


_delete, _capsule_freed = _DELETER(_deleted), _DESTRUCTOR(_freed)


def to_capsule(array: DeviceArray, device: InstanceDevice, stream: int | None) -> object:
    """Return a capsule of the memory. Its consumer may use it on `stream` at once: as `__dlpack__` numbers streams.

    None is the legacy default stream (Python array API standard).
    """
    if stream != _NO_WAIT:
        device.before(_LEGACY if stream is None else stream)
    readers = getattr(array.owner, "readers", None)
    if readers is not None:  # memory of another worker, see `LeasedMemory`
        readers.add(_LEGACY if stream is None else stream)
    shape = (ctypes.c_int64 * max(array.ndim, 1))(*array.shape)
    code, bits = DLPACK_CODES[array.datatype]
    tensor = _DlTensor(array.address, CUDA, array.device_id, array.ndim, code, bits, 1, shape, None, 0)
    managed = _DlManagedTensor(tensor, None, _delete)
    address = ctypes.addressof(managed)
    _exported[address] = managed, shape, array
    return _new(address, _NAME, _capsule_freed)


class _Imported:
    """Memory of another library. Its deleter is called when nothing uses the memory any more."""

    def __init__(self, managed: _DlManagedTensor, capsule: object) -> None:
        weakref.finalize(self, _give_back, managed, capsule).atexit = False


def _give_back(managed: _DlManagedTensor, capsule: object) -> None:
    if managed.deleter:
        managed.deleter(ctypes.addressof(managed))


def from_source(source: Any, device: InstanceDevice) -> DeviceArray | None:
    """Return the memory of a capsule, or of an object with `__dlpack__`, on a CUDA device; None for other memory.

    What computes it comes before what is enqueued on the instance's stream from now on. Raises `TritonModelException`.
    """
    if type(source).__name__ == "PyCapsule":
        if not _is_valid(source, _NAME):
            return None
        capsule = source
    elif hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        if int(source.__dlpack_device__()[0]) != CUDA:
            return None
        capsule = source.__dlpack__(stream=device.stream)
    else:
        return None
    managed = _DlManagedTensor.from_address(_pointer(capsule, _NAME))
    tensor = managed.tensor
    if tensor.device_type != CUDA:
        return None
    shape = [tensor.shape[index] for index in range(tensor.ndim)]
    datatype = _DATATYPES.get((tensor.code, tensor.bits))
    if datatype is None or tensor.lanes != 1:
        raise TritonModelException("DLDataType is not supported by Python backend.")
    if tensor.strides and not _in_order(shape, [tensor.strides[index] for index in range(tensor.ndim)]):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    if capsule is source:  # nobody has said on which stream it is computed: libraries use the default one
        device.after(_LEGACY)
    _set_name(capsule, _USED)
    address = (tensor.data or 0) + tensor.byte_offset
    return DeviceArray(address, datatype, shape, tensor.device_id, _Imported(managed, capsule))


def _in_order(shape: list[int], strides: list[int]) -> bool:
    if not element_count(shape):
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


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
        return to_capsule(array, self._device, stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._on_device.device_id

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
        array = from_source(source, device)
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
