"""The `pb_utils` functions for datatypes: Triton's names and numbers, NumPy's types, and serialized BYTES."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shm.arrays import NUMPY_TYPES
from shm.datatypes import DATATYPES
from shm.strings import decode_strings, encode_strings

if TYPE_CHECKING:
    from shm.arrays import Array

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
