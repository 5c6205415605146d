"""The text of JSON documents around some of their values, in which a document of the same kind is read without parsing.

A complete JSON value in the place of another one makes a document of the same structure. So a text that has the pieces
of a skeleton, and complete values between them, is the document of the skeleton with these values, and nothing else.
Each value is decoded in a way that takes exactly its type; what that refuses, and every other text, is left to a
parser, which says what is wrong with it. Pure.
"""

from __future__ import annotations

import itertools
import re
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from protocols.http.json.document import UNDECODABLE
from protocols.http.json.tensor import ELEMENT_TYPES, FAST_DEPTH, nesting, typed_decoder
from shm.datatypes import DATATYPES, encode_strings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Longer texts around the values are not kept.
_MAX_PIECES_BYTE_SIZE = 2048

#: Up to this many numbers, msgspec is faster if it knows how many there are. It stops at the first one too many, so
#: that numbers with large exponents, of which each takes it 10 us, take no longer than a millisecond. orjson reads more
#: numbers faster, and all of them in nearly the same time.
_FEW_NUMBERS = 96

_decode_string = msgspec.json.Decoder(str).decode


class ValueReader(msgspec.Struct, frozen=True):
    """Reads the text of one value."""

    #: Decodes the text, or raises what is in `UNDECODABLE`.
    decode: Callable[[bytes], Any]
    #: Gets the elements of the decoded arrays, and returns raw tensor bytes; raises what is in `_UNPACKABLE`. None
    #: where the decoded value is wanted.
    pack: Callable[..., bytes] | None = None
    #: How many arrays are nested; 0 for a scalar, which `pack` gets as its only argument.
    depth: int = 1
    #: Whether `decode` knows no datatype, and `pack` refuses all that is no number, but for `true` and `false`.
    of_numbers: bool = False


#: Reads a string.
STRING = ValueReader(_decode_string)


class _WrongNumber(Exception):
    """An array of strings has more or fewer elements than wanted."""


#: What `ValueReader.pack` raises for elements that are too many, too few, out of range, or nested in another way.
_UNPACKABLE = (struct.error, OverflowError, TypeError, _WrongNumber)

#: The characters by which `true` and `false` are found in a text of numbers.
_IN_TRUE, _IN_FALSE = b"u", b"l"


def tensor_reader(datatype: str, element_count: int, example: bytes) -> ValueReader | None:
    """Return the reader of tensor data that is nested like the array `example`; None if there is none.

    The number of BYTES elements is not checked: the worker checks it.
    """
    depth = nesting(example)
    if datatype not in ELEMENT_TYPES or not 1 <= depth <= FAST_DEPTH:
        return None
    typecode = DATATYPES[datatype].typecode
    pack = struct.Struct(f"<{element_count}{typecode}").pack if typecode else _pack_strings
    element_type = ELEMENT_TYPES[datatype][0]
    if element_type in (int, float):
        if depth == 1 and element_count <= _FEW_NUMBERS:
            exact: Any = tuple[(element_type,) * element_count]  # type: ignore[misc]  # made for msgspec
            return ValueReader(msgspec.json.Decoder(exact).decode, pack, depth)
        return ValueReader(orjson.loads, pack, depth, of_numbers=True)
    return ValueReader(typed_decoder(ELEMENT_TYPES[datatype][0], depth).decode, pack, depth)


def flat_reader(datatype: str, element_count: int) -> ValueReader | None:
    """Return the reader of an array with this number of elements and no others in it; None if there is none."""
    reader = tensor_reader(datatype, element_count, b"[")
    if reader is None or datatype != "BYTES":
        return reader

    def pack_counted(*elements: str) -> bytes:
        if len(elements) != element_count:
            raise _WrongNumber
        return encode_strings(elements)

    return ValueReader(reader.decode, pack_counted)


def scalar_reader(datatype: str) -> ValueReader | None:
    """Return the reader of a single element that is no array; None if there is none."""
    if datatype not in ELEMENT_TYPES:
        return None
    typecode = DATATYPES[datatype].typecode
    pack = struct.Struct(f"<{typecode}").pack if typecode else _pack_strings
    return ValueReader(msgspec.json.Decoder(ELEMENT_TYPES[datatype][0]).decode, pack, 0)


def _pack_strings(*elements: str) -> bytes:
    return encode_strings(elements)


class Hole(msgspec.Struct, frozen=True):
    """Where in a text a value stands, and how another one in its place is read."""

    start: int
    end: int
    reader: ValueReader


class JsonSkeleton:
    """The text around the values of a document, of which the beginning may be left away."""

    __slots__ = ("_first", "_last", "_values")

    def __init__(self, pieces: Sequence[bytes], readers: Sequence[ValueReader]) -> None:
        """`pieces` stand around values: there is one more of them than there are `readers`."""
        self._first, self._last = pieces[0], pieces[-1]
        #: How each value is read, and the piece behind it; None for the last one.
        behind = [*pieces[1:-1], None]
        self._values = [
            (each.decode, each.pack, each.depth, each.of_numbers, piece)
            for each, piece in zip(readers, behind, strict=True)
        ]

    def read(self, text: bytes, begin: int) -> list[Any] | None:
        """Return the values in `text`, which has the pieces from `begin` on; None if it has not, or has other values.

        Each is what the decoder of its reader returns, or raw tensor bytes.
        """
        first, last = self._first, self._last
        if not text.startswith(first, begin) or not text.endswith(last):
            return None
        position, stop = begin + len(first), len(text) - len(last)
        values: list[Any] = []
        try:
            for decode, pack, depth, of_numbers, behind in self._values:
                end = stop if behind is None else text.find(behind, position, stop)
                if end < position:
                    return None
                part = text[position:end]
                if of_numbers and (_IN_TRUE in part or _IN_FALSE in part):
                    return None
                value = decode(part)
                if pack is not None:
                    while depth > 1:
                        value, depth = itertools.chain.from_iterable(value), depth - 1
                    value = pack(*value) if depth else pack(value)
                values.append(value)
                if behind is not None:
                    position = end + len(behind)
        except UNDECODABLE:
            return None
        except orjson.JSONDecodeError:
            return None
        except _UNPACKABLE:
            return None
        return values


def find_value(text: bytes, key: bytes, value: bytes, position: int = 0) -> int:
    """Return where in `text` from `position` on a member has `value`, -1 if nowhere. `key` is its name in JSON."""
    name = re.compile(re.escape(key) + rb"[ \t\n\r]*+:[ \t\n\r]*+")
    for found in name.finditer(text, position):
        if value and text.startswith(value, found.end()):
            return found.end()
    return -1


def make_skeleton(
    text: bytes, begin: int, holes: Sequence[Hole], is_cut_right: Callable[[bytes, list[bytes]], bool]
) -> JsonSkeleton | None:
    """Return the skeleton of `text` from `begin` on, with `holes` in the order of the text; None if there is none.

    The holes may be a guess: `is_cut_right` gets the text with another value in each hole, a string, and these strings
    as they stand in the text. It returns whether they are the values that were to be cut out.
    """
    pieces, position = [], begin
    for hole in holes:
        if hole.start < position:
            return None
        pieces.append(text[position : hole.start])
        position = hole.end
    pieces.append(text[position:])
    if not holes or sum(map(len, pieces)) > _MAX_PIECES_BYTE_SIZE:
        return None
    marks = [b'"\\u0000hole %d"' % number for number in range(len(holes))]
    marked = text[:begin] + b"".join(itertools.chain.from_iterable(zip(pieces, marks, strict=False))) + pieces[-1]
    if b'"\\u0000hole ' in text or not is_cut_right(marked, marks):
        return None
    return JsonSkeleton(pieces, [hole.reader for hole in holes])
