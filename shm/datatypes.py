"""The datatype table: Triton's names, element sizes, and the type codes of Python and numpy. Pure.

The configuration name is `TYPE_` and the protocol name (`TYPE_FP32`, `FP32`), but `TYPE_STRING` for `BYTES`.
Source: Triton's model_config.proto and the KServe v2 specification.

`encode_strings` and `decode_strings` are for the raw form of BYTES tensors: a 4-byte little-endian length precedes each
element.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


class Datatype(msgspec.Struct, frozen=True):
    """One row of the table."""

    #: Name in the protocols, such as `FP32`.
    name: str
    #: Name in a model configuration, such as `TYPE_FP32`.
    config_name: str
    #: Bytes of one element; 0 where elements differ in length (BYTES).
    byte_size: int
    #: Type code of `array.array` and `struct` with standard sizes; empty where Python has none.
    typecode: str
    #: numpy's type string, little-endian; `O` for BYTES; empty where numpy has none (BF16).
    numpy: str


_ROWS = (
    Datatype("BOOL", "TYPE_BOOL", 1, "?", "|b1"),
    Datatype("UINT8", "TYPE_UINT8", 1, "B", "|u1"),
    Datatype("UINT16", "TYPE_UINT16", 2, "H", "<u2"),
    Datatype("UINT32", "TYPE_UINT32", 4, "I", "<u4"),
    Datatype("UINT64", "TYPE_UINT64", 8, "Q", "<u8"),
    Datatype("INT8", "TYPE_INT8", 1, "b", "|i1"),
    Datatype("INT16", "TYPE_INT16", 2, "h", "<i2"),
    Datatype("INT32", "TYPE_INT32", 4, "i", "<i4"),
    Datatype("INT64", "TYPE_INT64", 8, "q", "<i8"),
    Datatype("FP16", "TYPE_FP16", 2, "e", "<f2"),
    Datatype("FP32", "TYPE_FP32", 4, "f", "<f4"),
    Datatype("FP64", "TYPE_FP64", 8, "d", "<f8"),
    Datatype("BYTES", "TYPE_STRING", 0, "", "O"),
    Datatype("BF16", "TYPE_BF16", 2, "", ""),
)

DATATYPES: dict[str, Datatype] = {row.name: row for row in _ROWS}

BY_CONFIG_NAME: dict[str, Datatype] = {row.config_name: row for row in _ROWS}

#: The largest element count and byte size that Triton's own checks accept (INT64_MAX).
MAX_SIZE = 2**63 - 1


def element_count(shape: Iterable[int]) -> int:
    """Return how many elements a tensor of `shape` has; 1 for an empty shape. Python integers do not overflow."""
    count = 1
    for dim in shape:
        count *= dim
    return count


_LENGTH = struct.Struct("<I")

#: The lengths of most elements, encoded.
_SHORT_LENGTHS = tuple(map(_LENGTH.pack, range(256)))


class BadFraming(ValueError):
    """The bytes are not a sequence of length-prefixed elements.

    `index` is the number of the element that is incomplete, from 0. `available` is how many bytes were left for its
    length or its content.
    """

    def __init__(self, index: int, available: int) -> None:
        super().__init__(f"element {index} does not fit into the {available} bytes that are left")
        self.index = index
        self.available = available


def encode_strings(elements: Iterable[bytes | str]) -> bytes:
    """Return the raw form; `str` elements are encoded as UTF-8."""
    raw = [element.encode() if isinstance(element, str) else element for element in elements]
    parts = [b""] * (2 * len(raw))
    parts[1::2] = raw
    lengths = map(len, raw)
    try:
        parts[::2] = map(_SHORT_LENGTHS.__getitem__, lengths)
    except IndexError:
        parts[::2] = map(_LENGTH.pack, map(len, raw))
    return b"".join(parts)


def decode_strings(data: bytes | bytearray | memoryview) -> list[bytes]:
    """Return copies of the elements. Raises `BadFraming`."""
    octets = bytes(data)  # parts of `bytes` are made in half the time of parts of a view
    elements: list[bytes] = []
    position, end = 0, len(octets)
    length_at, add = _LENGTH.unpack_from, elements.append
    while position < end:
        if end - position < 4:
            raise BadFraming(len(elements), end - position)
        begin = position + 4
        position = begin + length_at(octets, position)[0]
        if position > end:
            raise BadFraming(len(elements), end - begin)
        add(octets[begin:position])
    return elements
