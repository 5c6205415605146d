"""`pb_utils.Tensor`: a name and an array, taken from numpy, from DLPack or from an input of a request.

Tensors hold arrays and never copy them, but for three cases: arrays not in C order, read-only bytes of
a message, and inputs in a client's memory where the model asked for writable ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backends.python import datatypes, dlpack
from backends.python.failures import TritonModelException, incompatible
from backends.worker.request import OutputValue
from shm.arrays import to_array

if TYPE_CHECKING:
    from backends.worker.request import InputView
    from shm.arrays import Array


class Tensor:
    """A tensor in CPU memory. BF16, that numpy lacks, is held as uint16."""

    __slots__ = ("_array", "_datatype", "_name", "_view", "_writable")

    _name: str
    _datatype: str
    #: None until the first use of a tensor that comes from `_view`.
    _array: Array | None
    _view: InputView | None
    _writable: bool

    def __init__(self, name: str, array: Array, /) -> None:
        """Hold `array`, not a copy; an array that is not in C order is copied."""
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise incompatible("__init__", "Tensor(arg0: str, arg1: numpy.ndarray)", name, array)
        datatype = datatypes.name_of(array)
        if datatype is None:
            raise TritonModelException("NumPy dtype is not supported.")
        self._hold(name, datatype, array if array.flags.c_contiguous else np.ascontiguousarray(array))

    def _hold(self, name: str, datatype: str, array: Array | None, view: InputView | None = None) -> None:
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        self._name = name
        self._datatype = datatype
        self._array = array
        self._view = view
        self._writable = False

    @classmethod
    def received(cls, view: InputView, *, writable: bool) -> Tensor:
        """Return the tensor of a request's input; `writable` asks for a copy of a client's memory."""
        tensor = cls.__new__(cls)
        tensor._name = view.name
        tensor._datatype = view.datatype
        tensor._array = None
        tensor._view = view
        tensor._writable = writable
        return tensor

    @staticmethod
    def from_dlpack(name: str, source: Any, /) -> Tensor:
        """Return a tensor over the memory of `source`, a DLPack capsule or an object with `__dlpack__`."""
        array, bfloat = dlpack.from_capsule(source)
        datatype = "BF16" if bfloat else datatypes.name_of(array)
        if datatype is None:
            raise TritonModelException("DLDataType is not supported by Python backend.")
        tensor = Tensor.__new__(Tensor)
        tensor._hold(name, datatype, array)
        return tensor

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Return the tensor's array, the same one each time; BYTES is an object array of `bytes`.

        An input that lies in a client's shared memory is read-only.
        """
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        return self._elements()

    def triton_dtype(self) -> int:
        """Return the datatype's number, as `triton_to_numpy_type` takes it."""
        return datatypes.NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        return list(self._view.shape if self._view is not None else self._elements().shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> object:
        """Return a DLPack capsule; not for BYTES."""
        return self.__dlpack__()

    def __dlpack__(self, stream: object = None) -> object:
        """Return a DLPack capsule; `stream` means nothing for CPU memory."""
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.to_capsule(self._elements(), bfloat=self._datatype == "BF16")

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU_DEVICE

    def output(self) -> OutputValue:
        """Return the tensor as an output of a response. Shares the array."""
        array = self._array if self._array is not None else self._elements()
        if array.dtype.kind == "S":
            array = array.astype(object)
        return OutputValue(self._name, self._datatype, array)

    def _elements(self) -> Array:
        if self._array is None:
            assert self._view is not None
            self._array = _array_of(self._view, writable=self._writable)
        return self._array


def _array_of(view: InputView, *, writable: bool) -> Array:
    """Return the input as an array that the model may change, unless it is a client's memory."""
    datatype = "UINT16" if view.datatype == "BF16" else view.datatype
    array = to_array(datatype, view.shape, view.data)
    if datatype == "BYTES":
        return array
    if view.foreign and not writable:
        array.flags.writeable = False
        return array
    # Tensors inside a message are read-only and small, copies of a client's memory were asked for.
    return array.copy() if view.foreign or not array.flags.writeable else array
