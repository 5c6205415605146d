"""Converts between raw tensor bytes and numpy arrays. For workers: the kernel does not import numpy.

The raw form is little-endian and row-major. A 4-byte length precedes each BYTES element; BYTES tensors become object
arrays of `bytes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shm.datatypes import DATATYPES, decode_strings, encode_strings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shm.tensor import Buffer

    Array = np.ndarray[Any, np.dtype[Any]]

NUMPY_TYPES: dict[str, np.dtype[Any]] = {row.name: np.dtype(row.numpy) for row in DATATYPES.values() if row.numpy}
#: The types whose `array.tobytes()` is the raw form: native byte order, which is little-endian on x86-64 and ARM.
RAW_TYPES = frozenset(dtype for dtype in NUMPY_TYPES.values() if not dtype.hasobject)
_NAMES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in NUMPY_TYPES.items()}


def address_of(data: Buffer) -> int:
    """Return where the bytes of a contiguous buffer begin, which may be read-only."""
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def datatype_of(array: Array) -> str | None:
    """Return the datatype's name, such as `FP32`; BYTES for any array of strings or objects; None for other types."""
    if array.dtype.kind in "OSU":
        return "BYTES"
    return _NAMES.get(array.dtype.newbyteorder("<"))


def to_array(datatype: str, shape: Sequence[int], data: bytes | bytearray | memoryview) -> Array:
    """Return an array over `data`, writable where `data` is; for BYTES a copy.

    Raises ValueError if `data` does not hold exactly the elements of `shape`.
    """
    if datatype == "BYTES":
        elements = decode_strings(data)
        array: Array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(shape)
    return np.frombuffer(data, NUMPY_TYPES[datatype]).reshape(shape)


def to_new_array(datatype: str, shape: Sequence[int], data: bytes | bytearray | memoryview) -> Array:
    """Return a writable copy of `data`; not for BYTES. Raises ValueError as `to_array` does."""
    dtype = NUMPY_TYPES[datatype]
    memory = bytearray(data)
    try:
        # One call, where `frombuffer` and `reshape` are two: faster for small tensors. Only for memory of our own: the
        # array does not prevent that its memory is unmapped or resized.
        array = np.ndarray(shape, dtype, memory)
    except (TypeError, ValueError):
        return to_array(datatype, shape, memory)
    return array if array.nbytes == len(memory) else to_array(datatype, shape, memory)


def to_bytes(array: Array) -> bytes | memoryview:
    """Return the raw form: a view of a contiguous array, else a copy. Strings are encoded as UTF-8."""
    if array.dtype.kind in "OSU":
        return encode_strings(_as_strings(array))
    contiguous = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if not contiguous.size:
        return b""
    return contiguous.reshape(-1).view(np.uint8).data


def _as_strings(array: Array) -> list[bytes | str]:
    """Return the elements in row-major order; `str` of those that are neither bytes nor str."""
    return [e if isinstance(e, (bytes, str)) else str(e) for e in array.reshape(-1).tolist()]


def array_address(array: Array) -> int:
    """Return where the elements of `array` begin."""
    address: int = array.__array_interface__["data"][0]
    return address
