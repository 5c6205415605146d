"""The rows of JSON of medium size: bodies whose size says little about how long they take to decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.heavy.attack import Attack, HeavyRow, HttpRequest
from bench.heavy.rows import bodies

if TYPE_CHECKING:
    from bench.heavy.attack import BuildAttack

#: Name of the row, model, datatype and element: numbers that JSON does not have, the smallest strings and integers, and
#: numbers that msgspec reads digit by digit.
_ELEMENTS = [
    ("NaN", "fp32", "FP32", "NaN"),
    ("empty strings", "text", "BYTES", '""'),
    ("digits", "int32", "INT32", "1"),
    ("large exponents", "fp32", "FP32", "1e300"),
]

#: Bytes of one body.
_BYTE_SIZES = (12 << 10, 24 << 10, 64 << 10, 256 << 10)

#: How many connections send how many requests, one after the other.
_CONNECTIONS = {1: 40, 64: 4}


def medium_json_rows() -> list[HeavyRow]:
    """Return the rows in the order of the report."""
    return [
        HeavyRow(
            f"http medium {name}, {byte_size >> 10} KiB, {connections} connection{'s' if connections > 1 else ''}",
            "http",
            _attack(f"/v2/models/{model}/infer", datatype, element, byte_size, connections),
            "200",
        )
        for name, model, datatype, element in _ELEMENTS
        for byte_size in _BYTE_SIZES
        for connections in _CONNECTIONS
    ]


def _attack(path: str, datatype: str, element: str, byte_size: int, connections: int) -> BuildAttack:
    def build(most: int) -> Attack:
        # All requests together have no more bytes than one body of another row.
        request = HttpRequest(path, bodies.elements(datatype, element, min(byte_size, most // 256)))
        return Attack([request] * _CONNECTIONS[connections], connections)

    return build
