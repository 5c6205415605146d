"""The raw form of BYTES tensors: a 4-byte little-endian length precedes each element. Pure."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    octets = bytes(data)  # parts of `bytes` are made in half the time of those of a view
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
