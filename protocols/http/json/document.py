"""JSON bodies of requests: decoded by msgspec, and if that fails once more by Triton's rules, with its error texts.

The type of a member is checked only when one of the `as_…` functions reads it, because Triton reports the first wrong
member that it reads, which need not be the first one in the text.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import msgspec

from kernel.errors import InternalError, InvalidArgument
from protocols.http.json.syntax import BYTE_ORDER_MARK, JsonSyntaxError, check_syntax
from protocols.request_limits import MAX_CONTROL_BYTE_SIZE

#: Stands for a member that a document does not have; `None` is JSON's null.
ABSENT = msgspec.UNSET

UINT64_MAX = 2**64 - 1

#: The deepest nesting that Triton accepts in tensor data.
MAX_DEPTH = 100

#: What msgspec raises for a text that it cannot decode.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

#: Larger texts are not searched for the exact place of an error: that takes 0.5 us a byte, and no other request is
#: served meanwhile.
_CHECKED_BYTE_SIZE = 8 << 10

#: A text of this size is not decoded as a whole where that can be avoided: it would become too many objects.
LARGE_BYTE_SIZE = 1 << 20

#: In a text that `made_valid` has returned, strings that begin with this stand for special numbers.
SPECIAL_MARK = "\0number "

fast_decoder = msgspec.json.Decoder()

#: Return the members of an object, or the elements of an array, each as its text. Raise what is in `UNDECODABLE`.
member_texts = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
element_texts = msgspec.json.Decoder(list[msgspec.Raw]).decode

#: With a group, so that `split` returns the strings, too.
_STRING = re.compile(r'("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)

#: A string (left as it is), or a number that JSON does not have.
_STRING_OR_SPECIAL_BYTES = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|-?NaN|-?Inf(?:inity)?', re.DOTALL)

#: The exponent of a number near the ends of a double's range. msgspec reads such a number digit by digit: that takes it
#: 10 to 40 us, and Python's `json` 0.3 us.
_EXTREME_EXPONENT = re.compile(rb"e[+-]?0*[23][0-9][0-9]")

#: Of a text that is nested too deep, more containers are not looked through: no client means to send them.
_MOST_CONTAINERS = 6_000

#: As many such numbers take no time that matters.
_FEW_NUMBERS = 8

#: Strings, up to the next bracket, or a bracket.
_STRINGS_OR_BRACKET = re.compile(rb'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)++|[\[\]{}]', re.DOTALL)
_OPENING, _CLOSING = (b"[", b"{"), (b"]", b"}")


class TooDeep(InvalidArgument):
    """A document is nested too deep. The text is that for tensor data: nothing else is nested as deep."""

    def __init__(self) -> None:
        super().__init__(f"Unable to parse 'data': JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")


def parse(text: bytes) -> Any:
    """Return the document in `text` as plain Python values. Raises `JsonSyntaxError` or `TooDeep`.

    What is nested deeper than `MAX_DEPTH` in a text of ordinary size may be missing: a member that must be a boolean is
    refused as an array, as in Triton, and not because of what is in it.
    """
    if not reads_slowly(text):
        try:
            return fast_decoder.decode(text)
        except UNDECODABLE:
            pass
    try:
        return parse_leniently(text)
    except TooDeep:
        if len(text) > MAX_CONTROL_BYTE_SIZE or text.count(b"[") + text.count(b"{") > _MOST_CONTAINERS:
            raise
        return parse_leniently(_shallow(text))


def reads_slowly(text: bytes) -> bool:
    """Whether `text` has numbers for which msgspec takes so long that another way to read it is faster."""
    if b"E" in text:
        text = text.replace(b"E", b"e")
    if text.count(b"e") <= _FEW_NUMBERS:  # usual
        return False
    return any(itertools.islice(_EXTREME_EXPONENT.finditer(text), _FEW_NUMBERS, None))


def _shallow(text: bytes) -> bytes:
    """Return `text` without what is in containers nested deeper than `MAX_DEPTH`."""
    kept, depth, position = bytearray(), 0, 0
    for found in _STRINGS_OR_BRACKET.finditer(text):
        bracket = found.group()
        if bracket in _OPENING:
            depth += 1
            if depth == MAX_DEPTH + 1:
                kept += text[position : found.end()]
        elif bracket in _CLOSING:
            if depth == MAX_DEPTH + 1:
                position = found.start()
            depth -= 1
    return bytes(kept + text[position:]) if depth <= MAX_DEPTH else bytes(kept)


def parse_leniently(text: bytes) -> Any:
    """Do the same for a `text` that msgspec refused: Triton accepts more than JSON."""
    try:
        if len(text) <= _CHECKED_BYTE_SIZE:
            text = text[: check_syntax(text)]
        decoded = text.decode("utf-8-sig")
        # Python reads NaN, Infinity and -Infinity itself.
        if "-NaN" in decoded or decoded.count("Inf") != decoded.count("Infinity"):
            decoded = _with_python_numbers(decoded)
        return json.loads(decoded)
    except RecursionError:
        raise TooDeep from None
    except UnicodeDecodeError as error:
        raise JsonSyntaxError("Invalid encoding in string.", error.start) from None
    except ValueError as error:
        raise JsonSyntaxError("Invalid value.", getattr(error, "pos", 0)) from None


def made_valid(text: bytes) -> bytes:
    """Return a `text` that msgspec refused with each number that JSON does not have as a string after `SPECIAL_MARK`.

    Such a text can be read piece by piece. Raises `JsonSyntaxError` if it is not UTF-8.
    """
    try:
        text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonSyntaxError("Invalid encoding in string.", error.start) from None
    valid = bytearray()
    position = len(BYTE_ORDER_MARK) if text.startswith(BYTE_ORDER_MARK) else 0
    for found in _STRING_OR_SPECIAL_BYTES.finditer(text, position):  # `sub` would keep all pieces until its end
        special = found.group()
        if special[:1] != b'"':
            valid += text[position : found.start()]
            valid += b'"\\u0000number %b"' % _python_special_text(special.decode()).encode()
            position = found.end()
    valid += text[position:]
    return bytes(valid)


def _with_python_numbers(text: str) -> str:
    """Return `text` with each special number as Python's `json` reads it, and all strings as they are."""
    parts = _STRING.split(text)  # strings are at the odd places; no step of Python for each of thousands
    others = "\0".join(parts[::2]).replace("-NaN", "NaN").replace("Infinity", "Inf").replace("Inf", "Infinity")
    replaced = others.split("\0")
    if len(replaced) == len(parts[::2]):  # else a NUL is outside of strings, and `text` is no JSON
        parts[::2] = replaced
    return "".join(parts)


def _python_special_text(found: str) -> str:
    if found.endswith("NaN"):
        return "NaN"
    return "-Infinity" if found[0] == "-" else "Infinity"


def member(document: Any, name: str) -> Any:
    """Return a member of `document`; `ABSENT` where it is missing, or `document` is not an object."""
    return document.get(name, ABSENT) if isinstance(document, dict) else ABSENT


def required(document: Any, name: str) -> Any:
    """Return a member of `document`. Raises `InternalError` if there is none."""
    found = member(document, name)
    if found is ABSENT:
        raise absent(name)
    return found


def absent(name: str) -> InternalError:
    return InternalError(f"attempt to access non-existing object member '{name}'")


def as_string(value: Any) -> str:
    if not isinstance(value, str):
        raise InternalError("attempt to access JSON non-string as string")
    return value


def as_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InternalError("attempt to access JSON non-boolean as boolean")
    return value


def as_unsigned(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= UINT64_MAX:
        raise InternalError("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def as_array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise InternalError("attempt to access JSON non-array as array")
    return value


def as_members(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InternalError("attempt to get members for non-object")
    return value
