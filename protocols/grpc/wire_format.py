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
_VARINT, _FIXED64, _WITH_LENGTH, _GROUP, _GROUP_END, _FIXED32 = 0, 1, 2, 3, 4, 5

#: Limits of protobuf: bytes of a tag, of any other number, and how deep groups are nested.
_TAG_BYTE_SIZE, _VARINT_BYTE_SIZE, _MAX_DEPTH = 5, 10, 100
_MAX_TAG, _MAX_LENGTH = 2**32 - 1, 2**31 - 1
_MASK = 2**64 - 1

#: The most fields of a message that is parsed on the event loop, and the most in its groups. To walk over 128 fields
#: takes about 0.1 ms.
MAX_LOOP_FIELDS = 128


class MessageField(msgspec.Struct, frozen=True):
    """A field of a message: where it begins, where its content starts and ends. Only one with a length has content.

    A group is one field, with all that is in it. No message of ours has groups: protobuf skips them.
    """

    number: int
    begin: int
    start: int
    end: int
    has_length: bool


def fields_of(view: memoryview, most_in_groups: int) -> Iterator[MessageField]:
    """Yield the fields of a message. Raises protobuf's `DecodeError` where it is not understood.

    A group is walked over in one step. So that this ends soon, all groups of the message together may have
    `most_in_groups` fields; a message with more is not understood.
    """
    position, size = 0, len(view)
    while position < size:
        begin = position
        tag, position = read_tag(view, position)
        wire_type = tag & 7
        start = position
        if wire_type == _WITH_LENGTH:
            length, start = read_length(view, position)
            position = start + length
        elif wire_type == _GROUP:
            position, most_in_groups = _end_of_group(view, position, tag >> 3, most_in_groups)
            start = position
        else:
            start = position = _end_of_number(view, position, wire_type)
        if position > size:
            raise DecodeError("a field that is cut short")
        yield MessageField(tag >> 3, begin, start, position, wire_type == _WITH_LENGTH)


def _end_of_number(view: memoryview, position: int, wire_type: int) -> int:
    if wire_type == _VARINT:
        return read_varint(view, position)[1]
    if wire_type not in (_FIXED64, _FIXED32):
        raise DecodeError("the end of a group that has not begun, or an unknown type of field")
    return position + (8 if wire_type == _FIXED64 else 4)


def _end_of_group(view: memoryview, position: int, number: int, most: int) -> tuple[int, int]:
    """Return where the group `number` ends, whose tag ends at `position`, and how many of `most` fields are left.

    Raises `DecodeError`.
    """
    open_groups = [number]
    while open_groups:
        if most <= 0:
            raise DecodeError("groups with too many fields")
        most -= 1
        if position >= len(view):
            raise DecodeError("a group without an end")
        tag, position = read_tag(view, position)
        wire_type = tag & 7
        if wire_type == _GROUP:
            open_groups.append(tag >> 3)
            if len(open_groups) > _MAX_DEPTH:
                raise DecodeError("groups are nested too deep")
        elif wire_type == _GROUP_END:
            if open_groups.pop() != tag >> 3:
                raise DecodeError("the end of another group")
        elif wire_type == _WITH_LENGTH:
            length, position = read_length(view, position)
            position += length
        else:
            position = _end_of_number(view, position, wire_type)
    return position, most


def read_tag(view: memoryview, position: int) -> tuple[int, int]:
    """Return the number and type of a field, as protobuf joins them, and where they end. Raises `DecodeError`."""
    tag, end = read_varint(view, position, _TAG_BYTE_SIZE)
    if end > len(view) or tag > _MAX_TAG or tag < 8:
        raise DecodeError("a field that is cut short, or has no number")
    return tag, end


def read_length(view: memoryview, position: int) -> tuple[int, int]:
    """Return the length of a field and where its content starts. Raises `DecodeError`."""
    length, end = read_varint(view, position)
    if end > len(view) or length > _MAX_LENGTH:
        raise DecodeError("a field that is cut short, or too long")
    return length, end


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
        for count, field in enumerate(fields_of(view, MAX_LOOP_FIELDS), 1):
            if field.number == _RAW_FIELD and field.has_length:
                raw_contents.append(view[field.start : field.end])
            else:
                rest.append(view[field.begin : field.end])
                rest_size += field.end - field.begin
            if count > MAX_LOOP_FIELDS or (max_rest is not None and rest_size > max_rest):
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


def read_varint(view: memoryview, position: int, max_byte_size: int = _VARINT_BYTE_SIZE) -> tuple[int, int]:
    """Return a number and where it ends; a position behind the message where it has no end, or more bytes."""
    number = 0
    for index, octet in enumerate(view[position : position + max_byte_size]):
        number |= (octet & 0x7F) << 7 * index
        if octet < 0x80:
            return number & _MASK, position + index + 1
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
