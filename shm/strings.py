"""BYTES tensors: each element is a 4-byte little-endian length and then its bytes. Pure."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LENGTH = struct.Struct("<I")


class BadFraming(ValueError):
    """The bytes are not a sequence of length-prefixed elements.

    `available` is how many bytes were left where an element or a length did not fit, and `index`
    the number of the element there.
    """

    def __init__(self, index: int, available: int) -> None:
        super().__init__(f"element {index} does not fit into the {available} bytes that are left")
        self.index = index
        self.available = available


def encode_strings(elements: Iterable[bytes | str]) -> bytes:
    """Return the elements, each behind its length; `str` is encoded as UTF-8."""
    parts: list[bytes] = []
    for element in elements:
        raw = element.encode() if isinstance(element, str) else element
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    return b"".join(parts)


def decode_strings(data: bytes | bytearray | memoryview) -> list[bytes]:
    """Return the elements. Raises `BadFraming`; copies every element out of `data`."""
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
