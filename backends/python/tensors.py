"""`pb_utils.Tensor`: a name and an array, from NumPy, from DLPack, or from an input of a request.

A tensor does not copy its array, with three exceptions: arrays that are not in C order, inputs inside a message (which
is read-only), and inputs in a client's memory if the model needs writable inputs.

The `pb_utils` functions for datatypes: Triton's names and numbers, NumPy's types, and serialized BYTES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backends.python import dlpack
from backends.python.conversions import as_text
from backends.python.failures import TritonModelException, incompatible_arguments
from backends.worker.request import OutputValue, in_memory_of_client
from shm.arrays import NUMPY_TYPES, to_array, to_new_array
from shm.datatypes import DATATYPES, decode_strings, encode_strings

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from shm.arrays import Array
    from shm.tensor import RequestedOutput
    from shm.tensor import Tensor as ReceivedTensor

#: Protocol name → number of TRITONSERVER_DataType. Our table has the same order.
NUMBERS: dict[str, int] = {name: number for number, name in enumerate(DATATYPES, start=1)}

#: Configuration name → NumPy type. As in Triton, BF16 is missing and TYPE_BOOL is Python's bool.
TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    row.config_name: bool if row.name == "BOOL" else NUMPY_TYPES[row.name].type
    for row in DATATYPES.values()
    if row.numpy
}

_TYPE_OF_NUMBER: dict[int, type[Any]] = {NUMBERS[name]: dtype.type for name, dtype in NUMPY_TYPES.items()}

_NUMBER_OF_TYPE: dict[np.dtype[Any], int] = {dtype: NUMBERS[name] for name, dtype in NUMPY_TYPES.items()}

#: NumPy type → protocol name. Byte strings of fixed length (dtype S) are missing.
NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_TYPES.items()}


def name_of(array: Array) -> str | None:
    """Return the protocol name of the array's datatype, or None for a type that Triton does not accept.

    Triton accepts neither `str` arrays (dtype U) nor a byte order that is not the machine's.
    """
    if array.dtype.kind == "S":
        return "BYTES"
    return NAMES.get(array.dtype)


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """Return the NumPy type for a configuration name such as `TYPE_FP32`. Raises `KeyError` for other names."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """Return the NumPy type for the number of a datatype, or None."""
    return _TYPE_OF_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: object) -> int | None:
    """Return the number of the datatype for a NumPy type or dtype, or None for any other object."""
    if data_type is None:  # NumPy would convert None to float64
        return None
    try:
        dtype = np.dtype(data_type)  # type: ignore[call-overload]  # a model may pass any object
    except TypeError:
        return None
    return NUMBERS["BYTES"] if dtype.kind == "S" else _NUMBER_OF_TYPE.get(dtype)


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Return the elements of a string array in row-major order, each after its length in 4 bytes.

    Elements of an object array that are not `bytes` are converted with `str`. As in Triton, the result is an empty
    tuple for an empty array, and None for an array of another dtype.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    elements = input_tensor.reshape(-1).tolist()
    return encode_strings(e if isinstance(e, bytes) else str(e) for e in elements)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return the elements of a serialized string array, as an object array with one dimension."""
    elements = decode_strings(encoded_tensor)
    array: Array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array


_NO_NAME = "Tensor name cannot be an empty string."


class Tensor:
    """A tensor in CPU memory. BF16, which NumPy lacks, is stored as uint16."""

    __slots__ = ("_array", "_datatype", "_name", "_view", "_writable")

    _name: str
    _datatype: str
    #: None before the first use of a tensor with a `_view`.
    _array: Array | None
    _view: ReceivedTensor | None
    _writable: bool

    def __init__(self, name: str, array: Array, /) -> None:
        """The tensor refers to `array`. It copies an array that is not in C order."""
        text = name if type(name) is str else as_text(name)
        if text is None or not isinstance(array, np.ndarray):
            raise incompatible_arguments("__init__", "Tensor(arg0: str, arg1: numpy.ndarray)", name, array)
        # Most types are in the table, which saves a function call.
        datatype = NAMES.get(array.dtype) or name_of(array)
        if datatype is None:
            raise TritonModelException("NumPy dtype is not supported.")
        if not text:
            raise TritonModelException(_NO_NAME)
        self._name = text
        self._datatype = datatype
        self._array = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        self._view = None
        self._writable = False

    @staticmethod
    def received(views: Sequence[ReceivedTensor], writable: bool) -> list[Tensor]:
        """Return the tensors of a request's inputs. With `writable`, inputs in a client's memory are copied."""
        tensors: list[Tensor] = []
        for view in views:
            tensor = Tensor.__new__(Tensor)
            tensor._name = view.name
            tensor._datatype = view.datatype
            tensor._array = None
            tensor._view = view
            tensor._writable = writable
            tensors.append(tensor)
        return tensors

    @staticmethod
    def from_dlpack(name: str, source: Any, /) -> Tensor:
        """Return a tensor that uses the memory of `source`, a DLPack capsule or an object with `__dlpack__`."""
        text = as_text(name)
        if text is None:
            raise incompatible_arguments("from_dlpack", "(arg0: str, arg1: object) -> Tensor", name, source)
        name = text
        for make in dlpack.from_gpu:
            found: Tensor | None = make(name, source)
            if found is not None:
                if not name:
                    raise TritonModelException(_NO_NAME)
                return found
        array, bfloat = dlpack.from_capsule(source)
        datatype = "BF16" if bfloat else name_of(array)
        if datatype is None:
            raise TritonModelException("DLDataType is not supported by Python backend.")
        if not name:
            raise TritonModelException(_NO_NAME)
        tensor = Tensor.__new__(Tensor)
        tensor._name = name
        tensor._datatype = datatype
        tensor._array = array
        tensor._view = None
        tensor._writable = False
        return tensor

    def name(self) -> str:
        """Return the name of the input or output."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the tensor's array, the same object each time. BYTES is an object array of `bytes`.

        An input in a client's shared memory is read-only.
        """
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        array = self._array
        return self._elements() if array is None else array

    def triton_dtype(self) -> int:
        """Return the number of the datatype, for `triton_to_numpy_type`."""
        return NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        """Return the dimensions; the first one is the batch dimension if the model batches."""
        return list(self._view.shape if self._view is not None else self._elements().shape)

    def is_cpu(self) -> bool:
        """Return whether the tensor is in CPU memory, so that `as_numpy` works."""
        return True

    def to_dlpack(self) -> object:
        """Return a DLPack capsule. Raises `TritonModelException` for BYTES."""
        return self.__dlpack__()

    def __dlpack__(
        self,
        stream: object = None,
        *,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return a DLPack capsule, as the Python array API standard has it. `stream` has no meaning for CPU memory.

        The capsule has no version, which all consumers take. Raises BufferError for another device.
        """
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        if dl_device is not None and tuple(dl_device) != dlpack.CPU_DEVICE:
            raise BufferError(f"tensor '{self._name}' is in CPU memory, and device {tuple(dl_device)} was asked for")
        elements = self._elements()
        return dlpack.to_capsule(elements.copy() if copy else elements, bfloat=self._datatype == "BF16")

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU_DEVICE

    def output(self) -> OutputValue:
        """Return the tensor as an output of a response. The output uses the same array."""
        array = self._elements()
        if array.dtype.kind == "S":
            array = array.astype(object)
        return OutputValue(self._name, self._datatype, array)

    def call_input(self) -> OutputValue | ReceivedTensor:
        """Return the tensor as an input of a call: bytes of a message that the model has not looked at go on as they
        are."""
        view = self._view
        if view is not None and self._array is None and type(view.data) is bytes:
            return view
        return self.output()

    def _elements(self) -> Array:
        """Return the array; create it at the first use. It is read-only only in a client's memory."""
        if self._array is not None:
            return self._array
        view = self._view
        assert view is not None
        datatype, data = view.datatype, view.data
        assert data is not None
        if datatype == "BYTES":
            array = to_array(datatype, view.shape, data)
        else:
            datatype = "UINT16" if datatype == "BF16" else datatype
            if in_memory_of_client(view):
                array = (to_new_array if self._writable else to_array)(datatype, view.shape, data)
            else:  # bytes of a message are read-only and small: the model gets a writable copy
                array = (to_new_array if type(data) is bytes else to_array)(datatype, view.shape, data)
        self._array = array
        return array


def select_outputs(
    tensors: Sequence[Tensor], requested: Sequence[RequestedOutput], configured: Set[str]
) -> list[OutputValue]:
    """Return the tensors that the client requested; without requested outputs, all configured ones.

    The values use the tensors' arrays.
    """
    outputs: list[OutputValue] = []
    for tensor in tensors:
        name = tensor._name
        if requested:
            for output in requested:
                if output.name == name:
                    break
            else:
                continue
        elif name not in configured:
            continue
        array = tensor._array
        if array is None or tensor._datatype == "BYTES":
            outputs.append(tensor.output())
        else:  # the usual case: saves a function call
            outputs.append(OutputValue(name, tensor._datatype, array))
    return outputs
