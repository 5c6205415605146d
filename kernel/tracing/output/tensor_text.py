"""The elements of a traced tensor as text: what a trace shows of its data. Pure."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.tracing.trace import TracedTensor

#: Datatype → the letter of `struct`, and the byte size of an element.
_FORMATS = {
    "BOOL": ("B", 1), "UINT8": ("B", 1), "UINT16": ("H", 2), "UINT32": ("I", 4), "UINT64": ("Q", 8),
    "INT8": ("b", 1), "INT16": ("h", 2), "INT32": ("i", 4), "INT64": ("q", 8),
    "FP16": ("e", 2), "BF16": ("H", 2), "FP32": ("f", 4), "FP64": ("d", 8),
}  # fmt: skip

#: How many digits always suffice to tell two numbers of a type apart.
_DIGITS = {"FP16": 5, "BF16": 4, "FP32": 9}

#: The most elements that are shown.
_MOST_ELEMENTS = 1024


def tensor_text(tensor: TracedTensor) -> tuple[str, str]:
    """Return the elements, with commas between them, and a note where some are missing; else an empty note."""
    if tensor.cut:
        return "", f"{tensor.byte_size} bytes, left out with later tensors: too many bytes of tensors are traced"
    if not tensor.data and tensor.byte_size:
        return "", f"{tensor.byte_size} bytes in shared memory, which the traces of the composing models show"
    if tensor.datatype == "BYTES":
        texts, whole = _strings(tensor.data)
    else:
        texts, whole = _numbers(tensor.datatype, tensor.data)
    if whole and len(tensor.data) >= tensor.byte_size and len(texts) <= _MOST_ELEMENTS:
        return ",".join(texts), ""
    del texts[_MOST_ELEMENTS:]
    return ",".join(texts), f"the first {len(texts)} elements of {tensor.byte_size} bytes"


def _strings(data: bytes) -> tuple[list[str], bool]:
    """Return BYTES elements as JSON strings, and whether the last one is complete."""
    texts: list[str] = []
    position = 0
    while position + 4 <= len(data):
        length = int.from_bytes(data[position : position + 4], "little")
        if position + 4 + length > len(data):
            return texts, False
        texts.append(json.dumps(data[position + 4 : position + 4 + length].decode(errors="backslashreplace")))
        position += 4 + length
    return texts, position == len(data)


def _numbers(datatype: str, data: bytes) -> tuple[list[str], bool]:
    letter, byte_size = _FORMATS[datatype]
    count = min(len(data) // byte_size, _MOST_ELEMENTS + 1)
    numbers = struct.unpack(f"<{count}{letter}", data[: count * byte_size])
    if datatype == "BF16":
        numbers = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(number << 16 for number in numbers)))
    if datatype in _DIGITS:
        most = _DIGITS[datatype]
        return [_short(number, letter if datatype != "BF16" else "", most) for number in numbers], True
    return [str(number).removesuffix(".0") for number in numbers], True


def _short(number: float, letter: str, most: int) -> str:
    """Return a short text for a number that has fewer than 64 bits: as Triton's with six digits if that is exact."""
    text = f"{number:.{min(6, most)}g}"
    if letter and math.isfinite(number):
        try:
            exact = struct.unpack(f"<{letter}", struct.pack(f"<{letter}", float(text)))[0] == number
        except OverflowError:  # the text is larger than the largest number
            exact = False
        if not exact:
            return f"{number:.{most}g}"
    return text
