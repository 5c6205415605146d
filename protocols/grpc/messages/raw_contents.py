"""The wire format of protobuf, as far as it is needed to leave large tensors out of parsing. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.request_limits import MAX_PARTS

if TYPE_CHECKING:
    from shm.tensor import Buffer

#: `ModelInferRequest.raw_input_contents`, and the wire types of protobuf.
_RAW_FIELD = 7
_VARINT, _FIXED64, _WITH_LENGTH, _FIXED32 = 0, 1, 2, 5

#: A message with more fields than this is parsed by protobuf alone: four kinds of parts, and a few other fields.
_MAX_FIELDS = 4 * MAX_PARTS + 64


def split_raw_contents(message: Buffer) -> tuple[bytes, list[memoryview]] | None:
    """Return the bytes of a ModelInferRequest without its raw contents, and those as views of `message`.

    None where the message is not what this understands; protobuf then says what it is.
    """
    view = memoryview(message)
    rest: list[memoryview] = []
    raw_contents: list[memoryview] = []
    position, size = 0, len(view)
    for _ in range(_MAX_FIELDS):
        if position == size:
            return b"".join(rest), raw_contents
        start = position
        tag, position = _read_varint(view, position)
        field, wire_type = tag >> 3, tag & 7
        if wire_type == _WITH_LENGTH:
            length, position = _read_varint(view, position)
            content = position
            position += length
        elif wire_type == _VARINT:
            _, position = _read_varint(view, position)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        else:
            return None
        if position > size or field == 0:
            return None
        if field == _RAW_FIELD and wire_type == _WITH_LENGTH:
            raw_contents.append(view[content:position])
        else:
            rest.append(view[start:position])
    return None


def first_raw_content(message_start: bytes) -> int:
    """Return where the first raw contents of a ModelInferRequest begin; 0 if that is behind `message_start`."""
    view = memoryview(message_start)
    position = 0
    while position < len(message_start):
        tag, position = _read_varint(view, position)
        if tag & 7 != _WITH_LENGTH:
            return 0
        length, position = _read_varint(view, position)
        if tag >> 3 == _RAW_FIELD:
            return position if position <= len(message_start) else 0
        position += length
    return 0


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    """Return a number and where it ends; a position behind the message where it has no end."""
    number = 0
    for index, octet in enumerate(view[position : position + 10]):
        number |= (octet & 0x7F) << 7 * index
        if octet < 0x80:
            return number, position + index + 1
    return 0, len(view) + 1


def varint(number: int) -> bytes:
    """Return a number that is not negative as protobuf writes it."""
    if number < 0x80:
        return bytes((number,))
    octets = bytearray()
    while number >= 0x80:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    octets.append(number)
    return bytes(octets)
