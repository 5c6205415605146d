"""How long it takes to decode and encode JSON of tensors, estimated beforehand from what is counted quickly. Pure.

The figures are nanoseconds of one processor of 2.5 GHz; `tests/protocols/http/json/test_cost.py` says which texts they
were measured with. They are for the decoders of exactly one datatype: what these refuse takes ten times as long.
"""

from __future__ import annotations

import re

#: Every text is read twice: to find the end of each tensor's data, and to decode it.
_BYTE_NS = 1.5

#: Each element ends with a comma; a number becomes an object, and then a part of the tensor.
_COMMA_NS = 28.0

#: Each string has two quotes. It becomes an object and bytes, behind their length.
_QUOTE_NS = 50.0

#: An escape within a string, and the array and object that a bracket opens.
_ESCAPE_NS, _ARRAY_NS, _OBJECT_NS = 40.0, 80.0, 3000.0

#: msgspec reads a number near the ends of a double's range digit by digit. Those have exponents of three digits.
_LARGE_EXPONENT_NS = 9000.0
_LARGE_EXPONENT = re.compile(rb"[eE][+-]?0*[1-9][0-9][0-9]")

#: From this many letters "e" on, those in names too, it is worth looking which are large exponents.
_FEW_EXPONENTS = 16

#: A number with more digits than a double has may lie between two doubles; to find that out takes this long a byte.
#: Such texts have few commas for their size.
_LONG_NUMBER_BYTES, _LONG_NUMBER_BYTE_NS = 24, 15.0

#: Encoding an element: to make an object of it, and to write that.
_ENCODED_NUMBER_NS = {"BOOL": 25.0, "FP32": 55.0, "FP64": 55.0, "INT64": 35.0, "UINT64": 35.0}
_ENCODED_INTEGER_NS = 25.0
_ENCODED_STRING_NS, _ENCODED_STRING_BYTE_NS = 250.0, 2.0


def decode_cost_us(text: bytes) -> float:
    """Return the microseconds that it takes to decode the JSON of a request, if only typed decoders read it."""
    byte_size, commas, quotes = len(text), text.count(b","), _count(text, b'"')
    cost_ns = byte_size * _BYTE_NS + commas * _COMMA_NS + quotes * _QUOTE_NS
    cost_ns += _count(text, b"[") * _ARRAY_NS + _count(text, b"{") * _OBJECT_NS + _count(text, b"\\") * _ESCAPE_NS
    if _has_many_exponents(text):
        cost_ns += len(_LARGE_EXPONENT.findall(text)) * _LARGE_EXPONENT_NS
    if byte_size > (commas + 1) * _LONG_NUMBER_BYTES and quotes < commas:
        cost_ns += byte_size * _LONG_NUMBER_BYTE_NS
    return cost_ns / 1000


def _has_many_exponents(text: bytes) -> bool:
    position = -1
    for _ in range(_FEW_EXPONENTS):
        position = text.find(b"e", position + 1)
        if position < 0:
            return b"E" in text
    return True


def _count(text: bytes, character: bytes) -> int:
    # To look for the last one takes a tenth of the time; in texts of numbers it is near the beginning.
    return text.count(character, 0, text.rfind(character) + 1)


def encode_cost_us(datatype: str, element_count: int, byte_size: int) -> float:
    """Return the microseconds that it takes to write `element_count` elements, of `byte_size` raw bytes, as JSON."""
    if datatype == "BYTES":
        return (element_count * _ENCODED_STRING_NS + byte_size * _ENCODED_STRING_BYTE_NS) / 1000
    return element_count * _ENCODED_NUMBER_NS.get(datatype, _ENCODED_INTEGER_NS) / 1000
