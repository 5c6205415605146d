"""The `pb_utils` functions about datatypes: Triton's names and numbers, numpy's types, and raw BYTES."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shm.arrays import NUMPY_TYPES
from shm.datatypes import DATATYPES
from shm.strings import decode_strings, encode_strings

if TYPE_CHECKING:
    from shm.arrays import Array

#: The numbers of TRITONSERVER_DataType, which has the order of our table, by protocol name.
NUMBERS: dict[str, int] = {name: number for number, name in enumerate(DATATYPES, start=1)}

#: By configuration name. As in Triton, BF16 is missing and TYPE_BOOL is Python's bool.
TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    row.config_name: bool if row.name == "BOOL" else NUMPY_TYPES[row.name].type
    for row in DATATYPES.values()
    if row.numpy
}

_TYPE_OF_NUMBER: dict[int, type[Any]] = {NUMBERS[name]: dtype.type for name, dtype in NUMPY_TYPES.items()}
_NUMBER_OF_TYPE: dict[np.dtype[Any], int] = {dtype: NUMBERS[name] for name, dtype in NUMPY_TYPES.items()}
#: Protocol names by numpy's types, but for byte strings of a fixed length (dtype S).
NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_TYPES.items()}


def name_of(array: Array) -> str | None:
    """Return the protocol name of the array's datatype, or None for one that Triton does not take.

    It takes no `str` arrays (dtype U) and no bytes in another order than the machine's.
    """
    if array.dtype.kind == "S":
        return "BYTES"
    return NAMES.get(array.dtype)


def triton_string_to_numpy(triton_type_string: str) -> type[Any]:
    """Return numpy's type for a configuration name such as `TYPE_FP32`; KeyError for others."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type[Any] | None:
    """Return numpy's type for a datatype's number, or None."""
    return _TYPE_OF_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: object) -> int | None:
    """Return the datatype's number for a numpy type or dtype, or None."""
    if data_type is None:  # numpy reads None as float64
        return None
    try:
        # Anything may come: what numpy does not know is answered with None.
        dtype = np.dtype(data_type)  # type: ignore[call-overload]  # anything may be given
    except TypeError:
        return None
    return NUMBERS["BYTES"] if dtype.kind == "S" else _NUMBER_OF_TYPE.get(dtype)


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Return the elements of a string array in row-major order, each behind its length of 4 bytes.

    Elements of an object array that are not bytes are written as their `str`. An empty array gives an
    empty tuple and an array of another dtype None, as in Triton.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    elements = input_tensor.reshape(-1).tolist()
    return encode_strings(e if isinstance(e, bytes) else str(e) for e in elements)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return the elements of a serialized string array as an object array with one dimension."""
    elements = decode_strings(encoded_tensor)
    array: Array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array
