"""The wire format of protobuf, as far as it is needed to leave large tensors out of parsing. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm.tensor import Buffer

#: `ModelInferRequest.raw_input_contents`, and the wire types of protobuf.
_RAW_FIELD = 7
_VARINT, _FIXED64, _WITH_LENGTH, _FIXED32 = 0, 1, 2, 5

#: The most fields of a message that is parsed on the event loop. To walk over 128 fields takes about 0.1 ms.
_MAX_FIELDS = 128


class MessageField(msgspec.Struct, frozen=True):
    """A field of a message: where it begins, where its content starts and ends. Contents of numbers are empty."""

    number: int
    begin: int
    start: int
    end: int
    has_length: bool


def fields_of(view: memoryview) -> Iterator[MessageField]:
    """Yield the fields of a message. Raises protobuf's `DecodeError` where it is not understood."""
    position, size = 0, len(view)
    while position < size:
        begin = position
        tag, position = read_varint(view, position)
        start = position
        wire_type = tag & 7
        if wire_type == _WITH_LENGTH:
            length, start = read_varint(view, position)
            position = start + length
        elif wire_type == _VARINT:
            _, position = read_varint(view, position)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        else:
            raise DecodeError("a group, or an unknown type of field")
        if position > size or tag < 8:
            raise DecodeError("a field that is cut short, or has no number")
        yield MessageField(tag >> 3, begin, start, position, wire_type == _WITH_LENGTH)


def split_raw_contents(message: Buffer, max_rest: int | None = None) -> tuple[bytes, list[memoryview]] | None:
    """Return the bytes of a ModelInferRequest without its raw contents, and those as views of `message`.

    None if the message is not what this understands, so that protobuf says what it is, where it has too many fields,
    or where more than `max_rest` bytes are left.
    """
    view = memoryview(message)
    rest: list[memoryview] = []
    raw_contents: list[memoryview] = []
    rest_size = 0
    try:
        for count, field in enumerate(fields_of(view), 1):
            if field.number == _RAW_FIELD and field.has_length:
                raw_contents.append(view[field.start : field.end])
            else:
                rest.append(view[field.begin : field.end])
                rest_size += field.end - field.begin
            if count > _MAX_FIELDS or (max_rest is not None and rest_size > max_rest):
                return None
    except DecodeError:
        return None
    return b"".join(rest), raw_contents


def first_raw_content(message_start: bytes) -> int:
    """Return where the first raw contents of a ModelInferRequest begin; 0 if that is behind `message_start`."""
    view = memoryview(message_start)
    position = 0
    while position < len(message_start):
        tag, position = read_varint(view, position)
        if tag & 7 != _WITH_LENGTH:
            return 0
        length, position = read_varint(view, position)
        if tag >> 3 == _RAW_FIELD:
            return position if position <= len(message_start) else 0
        position += length
    return 0


def read_varint(view: memoryview, position: int) -> tuple[int, int]:
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
