"""JSON with many elements, read piece by piece: they are counted, or become raw tensor bytes. Pure.

A text of 60 MiB that is decoded as a whole becomes objects of a gigabyte or more. `count_parts` makes none, and of
`write_data` only the objects of one piece exist at a time. The text must be valid JSON: msgspec has read it once to
find its end.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from protocols.http.json.tensor import BadData, NeedsCare, WrongElementCount, decode_piece, decode_typed_piece

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm.tensor import Buffer

_STRING = rb'"(?:[^"\\]++|\\.)*+"'

_ONE_STRING = re.compile(_STRING, re.DOTALL)


#: About how many bytes of text become objects at a time, and how many strings.
PIECE_BYTE_SIZE = 256 << 10

#: Strings of an array, each with the brackets and commas before it.
STRINGS = re.compile(rb"(?:[\s\[\],]*+" + _STRING + rb"){1,4096}+", re.DOTALL)

_END = re.compile(rb"[\s\[\]]*+")

#: Nested arrays are flattened: brackets become spaces.
_FLAT = bytes.maketrans(b"[]", b"  ")


class TooManyStrings(Exception):
    """A BYTES tensor has more elements than its shape says."""


def packed_size(datatype_byte_size: int, count: int, text: Buffer) -> int:
    """Return the most raw bytes that the elements in `text` can take; the byte size of BYTES is 0.

    A string of n bytes in JSON, with its quotes and a comma n + 3, becomes at most n + 4 raw bytes.
    """
    return count * datatype_byte_size if datatype_byte_size else len(text) * 4 // 3 + 4


def write_data(name: str, datatype: str, text: memoryview, element_count: int, memory: memoryview) -> int:
    """Write the raw bytes of the JSON array `text`, the data of input `name`, to `memory`; returns how many they are.

    `memory` has room for `element_count` elements; for BYTES as `packed_size` says. Raises `ServingError` for elements
    that are wrong, too many or too few, but too few strings: the worker checks their number. Raises `TooManyStrings`.
    """
    position = count = 0
    for piece in _string_pieces(text) if datatype == "BYTES" else _number_pieces(text):
        packed, piece_count = decode_piece(datatype, piece)
        count += piece_count
        if count > element_count:
            if datatype == "BYTES":
                raise TooManyStrings
            raise WrongElementCount(name, count, element_count, or_more=True)
        memory[position : position + len(packed)] = packed
        position += len(packed)
    if datatype != "BYTES" and count != element_count:
        raise WrongElementCount(name, count, element_count)
    return position


def write_flat(datatype: str, text: memoryview, element_count: int, memory: memoryview) -> int:
    """Do the same for a flat array of scalars that is usual. The text need not be valid JSON.

    Raises `NeedsCare` for all others, after it has written a part.
    """
    if len(text) < 2 or text[0] != 0x5B or text[-1] != 0x5D:
        raise NeedsCare
    begin, last, position, count = 1, len(text) - 1, 0, 0
    while begin < last:
        end = min(begin + PIECE_BYTE_SIZE, last)
        piece = bytes(text[begin:end])
        if end < last:
            cut = piece.rfind(b",")
            if cut < 0:
                raise NeedsCare
            piece, end = piece[:cut], begin + cut + 1
        packed, piece_count = decode_typed_piece(datatype, b"[%b]" % piece)
        count += piece_count
        # Between two commas nothing may be missing: each piece has an element.
        if not piece_count or count > element_count:
            raise NeedsCare
        memory[position : position + len(packed)] = packed
        position += len(packed)
        begin = end
    if count != element_count:
        raise NeedsCare
    return position


def _number_pieces(text: memoryview) -> Iterator[bytes]:
    """Yield the elements of nested arrays of scalars as flat arrays."""
    _check_array(text)
    position, size = 0, len(text)
    while position < size:
        end = min(position + PIECE_BYTE_SIZE, size)
        piece = bytes(text[position:end])
        if end < size:
            cut = piece.rfind(b",")
            if cut < 0:  # no element is as long, so this is space, or a wrong element
                piece, end = bytes(text[position:]), size
            else:
                piece, end = piece[:cut], position + cut + 1
        yield b"[%b]" % piece.translate(_FLAT)
        position = end


def _string_pieces(text: memoryview) -> Iterator[bytes]:
    """Yield the elements of nested arrays of strings as flat arrays."""
    _check_array(text)
    position = 0
    while (found := STRINGS.match(text, position)) is not None:
        yield b"[%b]" % b",".join(_ONE_STRING.findall(found.group()))
        position = found.end()
    if _END.fullmatch(text, position) is None:
        raise BadData("attempt to access JSON non-string as string", "Unable to parse JSON bytes array")


def _check_array(text: memoryview) -> None:
    if not len(text) or text[0] != 0x5B:
        raise BadData("attempt to access JSON non-array as array")


#: The end of a pattern for many parts, and how many: the memory for a match grows with them.
_MANY = rb"){0,4096}+"


def _container(depth: int) -> bytes:
    """Return a pattern of an array or object in which others are nested `depth` levels deep."""
    inner = rb"|" + _container(depth - 1) if depth else b""
    return rb"[\[{](?:[^\[\]{}\"]++|" + _STRING + inner + _MANY + rb"[\]}]"


#: Containers of usual depths are passed over in one match, which takes a hundredth of the time of single tokens.
_SHALLOW = _container(4)

#: What stands between the commas of the container that is counted, and between the brackets of those in it.
_OUTER = re.compile(rb"(?:[^\[\]{}\",]++|" + _STRING + rb"|" + _SHALLOW + _MANY, re.DOTALL)

_INNER = re.compile(rb"(?:[^\[\]{}\"]++|" + _STRING + rb"|" + _SHALLOW + _MANY, re.DOTALL)

#: Strings of an array without others in it, each with the comma before it, and what else may be in such an array.
_MANY_STRINGS = re.compile(rb"(?:[ \t\n\r,]*+" + _STRING + rb"){1,4096}+", re.DOTALL)

_SCALARS = re.compile(rb"[^\[\]{}\"]*+")

_SPACE = re.compile(rb"[ \t\n\r]*+")

_OPEN, _CLOSE, _COMMA = b"[{", b"]}", 0x2C


def count_parts(text: Buffer, limit: int) -> int:
    """Return how many elements or members the array or object `text` has, and `limit` + 1 for more than `limit`.

    1 for anything else.
    """
    if not len(text) or text[0] not in _OPEN:
        return 1
    space = _SPACE.match(text, 1)
    assert space is not None
    if text[space.end()] in _CLOSE:
        return 0
    return _count_flat(text, limit) or _count_nested(text, limit)


def _count_flat(text: Buffer, limit: int) -> int:
    """Return the number of elements of an array of scalars; 0 for anything else."""
    if text[0] != 0x5B:
        return 0
    count, position = 0, 1
    while (strings := _MANY_STRINGS.match(text, position)) is not None:
        octets = strings.group()
        count += octets.count(b'"') // 2 if b"\\" not in octets else len(_ONE_STRING.findall(octets))
        position = strings.end()
        if count > limit:
            return limit + 1
    rest = _SCALARS.match(text, position)
    if rest is None or rest.end() != len(text) - 1:
        return 0
    commas = memoryview(text)[position:-1].tobytes().count(b",")
    # Behind a string each comma begins an element, in an array of other scalars each but the first.
    return min(count + commas + (not count), limit + 1)


def _count_nested(text: Buffer, limit: int) -> int:
    count, depth, position, end = 1, 0, 1, len(text) - 1
    while position < end:
        found = (_INNER if depth else _OUTER).match(text, position)
        assert found is not None
        if found.end() > position:
            position = found.end()
            continue
        character = text[position]
        if character in _OPEN:
            depth += 1
        elif character in _CLOSE:
            depth -= 1
        elif not depth and character == _COMMA:
            count += 1
            if count > limit:
                break
        position += 1
    return count
