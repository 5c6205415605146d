"""Tensor data in JSON ⇄ raw tensor bytes, by datatype. Pure, and without NumPy.

Values are cast as Triton casts them: integers wrap around, floats lose precision. A decoder for
exactly the datatype reads the text. Only if it fails are the values checked one by one, for Triton's error.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
from array import array
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from kernel.errors import InternalError, InvalidArgument
from protocols.http.json.document import (
    MAX_DEPTH,
    SPECIAL_MARK,
    UINT64_MAX,
    UNDECODABLE,
    TooDeep,
    parse_leniently,
    reads_slowly,
)
from shm.datatypes import DATATYPES, BadFraming, decode_strings, encode_strings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm.tensor import Buffer

#: Arrays nested up to this depth have decoders; the values of deeper ones are checked one by one.
FAST_DEPTH = 8

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

#: What the elements of a datatype are in JSON, and what Triton calls it when they are something else.
ELEMENT_TYPES: dict[str, tuple[type, str]] = {
    "BOOL": (bool, "non-boolean as boolean"),
    "BYTES": (str, "non-string as string"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32", "UINT64"), (int, "non-unsigned-integer as unsigned-integer")),
    **dict.fromkeys(("INT8", "INT16", "INT32", "INT64"), (int, "non-signed-integer as signed-integer")),
    **dict.fromkeys(("FP32", "FP64"), (float, "non-number as double")),
}

#: Numbers that JSON does not have, as they stand in a text that was made valid.
_SPECIAL_NUMBERS = {SPECIAL_MARK + name: float(name) for name in ("NaN", "-NaN", "Infinity", "-Infinity")}

#: Characters of which one stands in any text with a value that is neither a number nor an array: in strings and
#: objects, in `true` and `null`, in `false`.
_NO_NUMBERS = (b'"', b"{", b"u", b"l")

#: For longer texts orjson takes so much memory that malloc gets it from the system, and gives it back, for each text:
#: 470 page faults for 330 KB, which take longer than what orjson saves.
_MOST_OF_ORJSON = 65536

#: How such a string begins in JSON.
_MARK = json.dumps(SPECIAL_MARK)[1:-1].encode()


class NeedsCare(Exception):
    """Data that no typed decoder reads, or that msgspec would not write as Triton does. It takes ten times as long."""


class BadData(InternalError):
    """The `data` of an input does not fit its datatype and shape."""

    def __init__(self, problem: str, prefix: str = "Unable to parse 'data'") -> None:
        super().__init__(f"{prefix}: {problem}")


class WrongElementCount(BadData):
    """The `data` of an input has more or fewer elements than its shape. Triton's text, and what it does not say."""

    def __init__(self, name: str, found: int, expected: int, *, or_more: bool = False) -> None:
        """`found` may be less than what there is: `or_more`."""
        more = " or more" if or_more else ""
        super().__init__(
            f"Shape does not match true shape of 'data' field (input '{name}' has {found}{more} elements in 'data', "
            f"its shape has {expected})"
        )


# ---- JSON to bytes --------------------------------------------------------------------------


def decode_data(name: str, datatype: str, text: Buffer, element_count: int, *, typed_only: bool = False) -> bytes:
    """Return the raw bytes of the JSON array `text`, flat or nested, for an input called `name`.

    The number of BYTES elements is not checked here: the worker checks it. Raises
    `ServingError`, and nothing else for any `text`; if `typed_only`, `NeedsCare` for what is wrong or unusual.
    """
    check_readable(name, datatype)
    values = _decode_fast(datatype, text)
    if values is None:
        if typed_only:
            raise NeedsCare
        values = _decode_carefully(name, datatype, text, element_count)
    if datatype != "BYTES" and len(values) != element_count:
        raise WrongElementCount(name, len(values), element_count)
    return _pack(datatype, values, typed_only=typed_only)


def decode_piece(datatype: str, text: bytes) -> tuple[bytes, int]:
    """Return the raw bytes of a flat JSON array, a piece of a large one, and how many elements they are.

    The large one is valid JSON. Its special numbers are strings (`SPECIAL_MARK`). Raises `BadData`.
    """
    expected, complaint = ELEMENT_TYPES[datatype]
    try:
        values: list[Any] = decode_elements(expected, 1, text)
    except UNDECODABLE:
        try:
            values = json.loads(text)
        except ValueError:  # the piece ends within an object
            values = [None]
        if expected is float:
            values = [_SPECIAL_NUMBERS.get(value, value) if type(value) is str else value for value in values]
        accepted = {int, float} if expected is float else {expected}
        if not accepted.issuperset(map(type, values)):
            raise _wrong_type(datatype, complaint) from None
    if expected is str and _MARK in text and not _SPECIAL_NUMBERS.keys().isdisjoint(values):
        raise _wrong_type(datatype, complaint)
    return _pack(datatype, values), len(values)


def decode_typed_piece(datatype: str, text: bytes) -> tuple[bytes, int]:
    """Do the same for a piece of scalars that need not be valid JSON. Raises `NeedsCare` for what is unusual."""
    if datatype == "BYTES":
        raise NeedsCare
    try:
        values: list[Any] = decode_elements(ELEMENT_TYPES[datatype][0], 1, text)
    except UNDECODABLE:
        raise NeedsCare from None
    return _pack(datatype, values, typed_only=True), len(values)


def _wrong_type(datatype: str, complaint: str) -> BadData:
    prefix = "Unable to parse JSON bytes array" if datatype == "BYTES" else "Unable to parse 'data'"
    return BadData(f"attempt to access JSON {complaint}", prefix)


def check_readable(name: str, datatype: str) -> None:
    """Raise unless JSON can carry `datatype` into the input `name`."""
    if datatype not in DATATYPES:
        raise InvalidArgument(f"invalid datatype for input {name}")
    if datatype not in ELEMENT_TYPES:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )


def _decode_fast(datatype: str, text: Buffer) -> list[Any] | None:
    """Return the elements, or None if they are wrong or unusual."""
    depth = nesting(text)
    if not 1 <= depth <= FAST_DEPTH:
        return None
    try:
        return decode_elements(ELEMENT_TYPES[datatype][0], depth, text)
    except UNDECODABLE:
        return None


def nesting(text: Buffer) -> int:
    """Return how many arrays open at the start of `text`, up to the largest number that has a decoder and one."""
    depth = 0
    for character in text:
        if character == 0x5B:
            depth += 1
            if depth > FAST_DEPTH:
                break
        elif character not in b" \t\n\r":
            break
    return depth


def decode_elements(element_type: type, depth: int, text: Buffer) -> list[Any]:
    """Return the elements of arrays that are nested `depth` levels deep; floats may be integers, as they are written.

    Raises what is in `UNDECODABLE` for every other text.
    """
    if element_type is float:
        octets = text if type(text) is bytes else bytes(text)
        if len(octets) <= _MOST_OF_ORJSON or reads_slowly(octets):
            return _decode_floats(depth, octets)
    values: list[Any] = typed_decoder(element_type, depth).decode(text)
    for _ in range(depth - 1):
        values = list(itertools.chain.from_iterable(values))
    return values


def _decode_floats(depth: int, text: bytes) -> list[Any]:
    """Do that for numbers. msgspec takes a third longer, and 500 times as long near the ends of a double's range."""
    if any(character in text for character in _NO_NUMBERS):
        raise msgspec.ValidationError("not only numbers")
    try:
        values: list[Any] = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
    if type(values) is not list:
        raise msgspec.ValidationError("no array")
    arrays = 1
    for _ in range(depth - 1):
        if not {list}.issuperset(map(type, values)):
            raise msgspec.ValidationError("a number among arrays")
        arrays += len(values)
        values = list(itertools.chain.from_iterable(values))
    if text.count(b"[", 0, text.rfind(b"[") + 1) != arrays:  # counting up to the end takes 25 times as long
        raise msgspec.ValidationError("an array among numbers")
    return values


@functools.cache
def typed_decoder(element_type: type, depth: int) -> msgspec.json.Decoder[Any]:
    """Return the decoder of arrays that are nested `depth` levels deep."""
    expected: Any = element_type
    for _ in range(depth):
        expected = list[expected]
    return msgspec.json.Decoder(expected)


def _decode_carefully(name: str, datatype: str, text: Buffer, element_count: int) -> list[Any]:
    """Return the elements, checked one by one; the first wrong one raises Triton's error."""
    document = parse_leniently(bytes(text))
    if not isinstance(document, list):
        raise BadData("attempt to access JSON non-array as array")
    expected, complaint = ELEMENT_TYPES[datatype]
    accepted = (int, float) if expected is float else (expected,)
    if len(document) == element_count and set(map(type, document)).issubset(accepted):  # usual: one dimension
        return document
    values: list[Any] = []
    for element in _flatten(document):
        if datatype != "BYTES" and len(values) == element_count:
            raise WrongElementCount(name, len(values) + 1, element_count, or_more=True)
        if type(element) not in accepted:
            raise _wrong_type(datatype, complaint)
        values.append(element)
    return values


def _flatten(nested: list[Any]) -> Iterator[Any]:
    """Yield the elements of nested arrays from left to right. Raises `TooDeep`."""
    stack = [iter(nested)]
    while stack:
        for element in stack[-1]:
            if isinstance(element, list):
                if len(stack) >= MAX_DEPTH:
                    raise TooDeep
                stack.append(iter(element))
                break
            yield element
        else:
            stack.pop()


def _pack(datatype: str, values: list[Any], *, typed_only: bool = False) -> bytes:
    if datatype == "BYTES":
        return encode_strings(values)
    if datatype == "BOOL":
        return bytes(values)
    typecode = DATATYPES[datatype].typecode
    try:
        return struct.pack(f"{len(values)}{typecode}", *values)  # three times as fast as an array
    except (OverflowError, struct.error):
        pass
    try:
        return array(typecode, values).tobytes()  # numbers beyond FP32 become infinite
    except OverflowError:
        if typed_only:
            raise NeedsCare from None
        return _pack_wrapping(datatype, typecode, values)


def _pack_wrapping(datatype: str, typecode: str, values: list[Any]) -> bytes:
    """Pack numbers of which some are out of range: 64-bit integers wrap around, as in a C cast."""
    if typecode in "fd":
        return array(typecode, [_to_double(value) for value in values]).tobytes()
    low, high = (0, UINT64_MAX) if typecode.isupper() else (_INT64_MIN, _INT64_MAX)
    if min(values) < low or max(values) > high:
        raise BadData(f"attempt to access JSON {ELEMENT_TYPES[datatype][1]}")
    mask = (1 << 8 * DATATYPES[datatype].byte_size) - 1
    return array(typecode.upper(), [value & mask for value in values]).tobytes()


def _to_double(value: float) -> float:
    """Return a number as a double; integers beyond its range become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


# ---- bytes to JSON --------------------------------------------------------------------------


def json_values(
    name: str, datatype: str, data: Buffer, element_count: int, *, plain_only: bool = False
) -> list[Any] | msgspec.Raw:
    """Return the values of `data` of the output `name` for JSON, or their JSON text where msgspec would not write what
    Triton writes (NaN, Infinity, strings that are not UTF-8).

    Raises `ServingError` where JSON cannot carry the datatype or the bytes are not of that shape; if `plain_only`,
    `NeedsCare` where msgspec would not write it.
    """
    if datatype == "BYTES":
        return _string_values(name, data, element_count, plain_only=plain_only)
    if datatype not in ELEMENT_TYPES:
        raise InvalidArgument(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    row = DATATYPES[datatype]
    if len(data) != element_count * row.byte_size:
        raise _wrong_size(name)
    if datatype == "BOOL":
        return list(map(bool, bytes(data)))
    elements: array[Any] = array(row.typecode)
    elements.frombytes(data)
    values = elements.tolist()
    return _float_text(values, plain_only=plain_only) if row.typecode in "fd" else values


def _float_text(values: list[float], *, plain_only: bool) -> msgspec.Raw:
    text = orjson.dumps(values)
    if b"n" not in text:  # orjson writes null for what is not finite, and "e+16" where Triton writes "e16"
        return msgspec.Raw(text.replace(b"e+", b"e") if b"+" in text else text)
    if plain_only:
        raise NeedsCare
    return msgspec.Raw(json.dumps(values, separators=(",", ":")).encode())


def _string_values(name: str, data: Buffer, element_count: int, *, plain_only: bool) -> list[Any] | msgspec.Raw:
    try:
        elements = decode_strings(data)
    except BadFraming:
        raise _wrong_size(name) from None
    if len(elements) != element_count:
        raise _wrong_size(name)
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        if plain_only:
            raise NeedsCare from None
        # Triton writes such bytes as they are, although the text is then not JSON.
        kept = [element.decode(errors="surrogateescape") for element in elements]
        text = json.dumps(kept, ensure_ascii=False, separators=(",", ":"))
        return msgspec.Raw(text.encode(errors="surrogateescape"))


def _wrong_size(name: str) -> InternalError:
    return InternalError(
        f"Failed to write 'data' field: output tensor shape does not match size of output for '{name}'"
    )
