"""The datatype table: Triton's names, element sizes, and the type codes of Python and numpy.

The configuration name is `TYPE_` and the protocol name (`TYPE_FP32`, `FP32`), but `TYPE_STRING` for `BYTES`.
Source: Triton's model_config.proto and the KServe v2 specification.
"""

from __future__ import annotations

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
