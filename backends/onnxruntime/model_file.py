"""Reads from the model file which inputs and outputs have no shape, not even a rank.

ONNX Runtime describes a scalar and a tensor of any rank in the same way. The file is read without its weights, by the
wire format of protobuf: it may have gigabytes, and the package `onnx` is not needed to run models.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Numbers of fields in onnx.proto.
_MODEL_GRAPH = 7
_GRAPH_INPUT, _GRAPH_OUTPUT = 11, 12
_VALUE_NAME, _VALUE_TYPE = 1, 2
_TYPE_TENSOR = 1
_TENSOR_SHAPE = 2

#: Wire types of protobuf: a number, 8 bytes, bytes after their length, 4 bytes.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class _NotOnnx(ValueError):
    """The file is not an ONNX model in protobuf's format; ONNX Runtime reads another one, too."""


def tensors_of_any_rank(path: Path) -> frozenset[str]:
    """Return the names of the model's inputs and outputs whose shape the file leaves open."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return frozenset(_names(data))
        except (_NotOnnx, IndexError, UnicodeDecodeError):
            return frozenset()


def _names(data: mmap.mmap) -> Iterator[str]:
    for graph, begin, end in _fields(data, 0, len(data)):
        if graph != _MODEL_GRAPH:
            continue
        for number, value_begin, value_end in _fields(data, begin, end):
            if number in (_GRAPH_INPUT, _GRAPH_OUTPUT):
                value = {number: span for number, *span in _fields(data, value_begin, value_end)}
                if _VALUE_NAME in value and not _has_shape(data, value.get(_VALUE_TYPE, [0, 0])):
                    yield data[slice(*value[_VALUE_NAME])].decode()


def _has_shape(data: mmap.mmap, span: list[int]) -> bool:
    """Whether a TypeProto has the shape of a tensor. Values that are not tensors count as if they had one."""
    kinds = {number: inner for number, *inner in _fields(data, *span)}
    if _TYPE_TENSOR not in kinds:
        return bool(kinds)
    return any(number == _TENSOR_SHAPE for number, *_ in _fields(data, *kinds[_TYPE_TENSOR]))


def _fields(data: mmap.mmap, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of a message, and where its bytes begin and end; numbers have no bytes."""
    while position < end:
        key, position = _varint(data, position)
        kind = key & 7
        if kind == _BYTES:
            byte_size, position = _varint(data, position)
        elif kind == _VARINT:
            byte_size, (_, position) = 0, _varint(data, position)
        elif kind in (_FIXED32, _FIXED64):
            byte_size = 4 if kind == _FIXED32 else 8
        else:
            raise _NotOnnx(kind)
        if position + byte_size > end:
            raise _NotOnnx(byte_size)
        yield key >> 3, position, position + byte_size
        position += byte_size


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    """Return a number and the position behind it."""
    value = shift = 0
    while True:
        octet = data[position]
        position += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise _NotOnnx(shift)
