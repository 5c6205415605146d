"""The raw form of BYTES tensors: a 4-byte little-endian length precedes each element. Pure."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LENGTH = struct.Struct("<I")


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
    parts: list[bytes] = []
    for element in elements:
        raw = element.encode() if isinstance(element, str) else element
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    return b"".join(parts)


def decode_strings(data: bytes | bytearray | memoryview) -> list[bytes]:
    """Return copies of the elements. Raises `BadFraming`."""
    view = memoryview(data)
    elements: list[bytes] = []
    position, end = 0, len(view)
    while position < end:
        if end - position < 4:
            raise BadFraming(len(elements), end - position)
        (length,) = _LENGTH.unpack_from(view, position)
        position += 4
        if end - position < length:
            raise BadFraming(len(elements), end - position)
        elements.append(bytes(view[position : position + length]))
        position += length
    return elements
