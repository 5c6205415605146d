"""Elements of a tensor as Python values ⇄ its raw bytes, without NumPy. Pure.

`naiad infer` sends and asks for raw bytes: JSON has no form for FP16 and BF16, nor for NaN, infinities, tensors without
dimensions and texts that are not UTF-8.
"""

from __future__ import annotations

import json
import struct
from itertools import repeat
from typing import TYPE_CHECKING, Any

from shm.datatypes import DATATYPES, decode_strings, encode_strings

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

#: How people write what JSON cannot.
_NOT_FINITE = ("nan", "inf", "+inf", "-inf", "infinity", "-infinity")

#: The letters of a random word, and how many it has.
_LETTERS, _WORD_LENGTH = "abcdefghijklmnopqrstuvwxyz", 16

#: The most letters of an element that an error repeats.
_SHOWN_LETTERS = 40


class BadElement(ValueError):
    """An element does not fit the datatype. The message says which and why."""


def flat(value: Any) -> Iterator[Any]:
    """Yield the elements of lists in lists, in row-major order; of an element, itself."""
    if isinstance(value, list):
        for each in value:
            yield from flat(each)
    else:
        yield value


def random_elements(datatype: str, count: int, source: random.Random) -> list[Any]:
    """Return floats between 0 and 1, integers below 10, or words."""
    if datatype == "BYTES":
        return ["".join(source.choices(_LETTERS, k=_WORD_LENGTH)) for _ in range(count)]
    if datatype == "BOOL":
        return [source.random() < 0.5 for _ in range(count)]
    if datatype in ("FP16", "BF16", "FP32", "FP64"):
        return [round(source.random(), 3) for _ in range(count)]
    return [source.randrange(10) for _ in range(count)]


def encode_elements(datatype: str, elements: Sequence[Any]) -> bytes:
    """Return the raw bytes of elements that JSON gave. BF16 is cut from FP32, as in Triton's clients.

    Raises `BadElement`.
    """
    row = DATATYPES.get(datatype)
    if row is None:
        raise BadElement("this command does not know the datatype")
    if datatype == "BYTES":
        return encode_strings([_as_text(element) for element in elements])
    if datatype == "BOOL":
        return bytes(map(_as_bool, elements))
    if row.typecode and row.typecode not in "efd":
        signed = row.typecode.islower()
        bits = 8 * row.byte_size - signed
        values: list[Any] = list(map(_as_integer, elements, repeat(-(2**bits) * signed), repeat(2**bits - 1)))
    else:
        values = list(map(_as_number, elements))
    try:
        raw = struct.pack(f"<{len(values)}{row.typecode or 'f'}", *values)
    except OverflowError:
        raise BadElement(f"{_shown(max(values, key=abs))} is too large") from None
    return memoryview(raw).cast("H")[1::2].tobytes() if datatype == "BF16" else raw


def decode_elements(datatype: str, data: bytes, count: int) -> list[Any]:
    """Return the first `count` elements of raw bytes, all of them if there are fewer; BYTES as `bytes`.

    Raises ValueError where `data` has parts of elements, or an unknown datatype.
    """
    row = DATATYPES.get(datatype)
    if row is None:
        raise ValueError(f"unknown datatype '{datatype}'")
    if datatype == "BYTES":
        return decode_strings(data)[:count]
    found, rest = divmod(len(data), row.byte_size)
    if rest:
        raise ValueError(f"{len(data)} bytes are no tensor of {datatype}")
    data = data[: min(found, count) * row.byte_size]
    if datatype == "BF16":
        upper_halves = bytearray(2 * len(data))
        memoryview(upper_halves).cast("H")[1::2] = memoryview(data).cast("H")
        data = bytes(upper_halves)
    return list(struct.unpack(f"<{min(found, count)}{row.typecode or 'f'}", data))


def _as_text(element: Any) -> bytes:
    if isinstance(element, bytes):  # of a NumPy file
        return element
    if not isinstance(element, str):
        raise BadElement(f"{_shown(element)} is not a text: put it into double quotes")
    try:
        return element.encode("utf-8", "surrogateescape")  # an argument with other bytes stays as it is
    except UnicodeEncodeError:
        raise BadElement(f"{_shown(element)} is not a text that UTF-8 can have") from None


def _as_bool(element: Any) -> bool:
    if element not in (0, 1) or isinstance(element, float):
        raise BadElement(f"{_shown(element)} is not true or false")
    return bool(element)


def _as_integer(element: Any, lowest: int, highest: int) -> int:
    if type(element) is not int:
        raise BadElement(f"{_shown(element)} is not a whole number")
    if not lowest <= element <= highest:
        raise BadElement(f"{_shown(element)} is not between {lowest} and {highest}")
    return element


def _as_number(element: Any) -> float:
    if isinstance(element, str) and element.strip().lower() in _NOT_FINITE:
        return float(element)
    if type(element) not in (int, float):
        raise BadElement(f"{_shown(element)} is not a number")
    try:
        return float(element)
    except OverflowError:
        raise BadElement(f"{_shown(element)} is too large") from None


def _shown(element: Any) -> str:
    text = json.dumps(element, default=repr)
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
