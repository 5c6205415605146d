"""Responses as bytes, for caches outside of the server. Pure.

A value is a checksum of what follows (CRC-32), the size of the head, the head (msgpack), and the bytes of the outputs
one after the other. Names of datatypes and shapes are checked when a value is read, so that a damaged entry, or one
written by another version of the server, is ignored.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import TYPE_CHECKING

import msgspec

from kernel.cache.interface import CachedResponse
from shm.arena import INLINE_LIMIT
from shm.datatypes import DATATYPES
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.request import ParameterValue

#: The format of values. It is part of the keys, so that servers with different formats do not see each other's.
FORMAT = 1

_FRONT = struct.Struct("<II")


class BadEntry(ValueError):
    """A value of a cache is not a response that this server has stored."""


class _EncodedOutput(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: list[int]
    byte_size: int


class _Head(msgspec.Struct, array_like=True):
    outputs: list[_EncodedOutput]
    parameters: dict[str, str | int | bool | float] | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


def encode(outputs: Sequence[Tensor], parameters: dict[str, ParameterValue] | None) -> bytes:
    """Return a response as bytes. The outputs are inline or in arenas."""
    described = [_EncodedOutput(each.name, each.datatype, each.shape, each.byte_size) for each in outputs]
    head = _encoder.encode(_Head(described, parameters))
    parts = [head, *(each.raw() for each in outputs)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join((_FRONT.pack(checksum, len(head)), *parts))


def decode(value: bytes) -> CachedResponse:
    """Return the response. Large outputs are views of `value`. Raises `BadEntry`."""
    if len(value) < _FRONT.size:
        raise BadEntry(f"{len(value)} bytes, expected at least {_FRONT.size}")
    checksum, head_size = _FRONT.unpack_from(value)
    view = memoryview(value)
    if zlib.crc32(view[_FRONT.size :]) != checksum:
        raise BadEntry("a wrong checksum")
    position = _FRONT.size + head_size
    try:
        head = _decoder.decode(view[_FRONT.size : position])
    except msgspec.MsgspecError as error:
        raise BadEntry(f"a head that cannot be read: {error}") from None
    outputs: list[Tensor] = []
    for described in head.outputs:
        data = view[position : position + described.byte_size]
        _check(described, len(data))
        position += described.byte_size
        small = described.byte_size <= INLINE_LIMIT
        outputs.append(Tensor(described.name, described.datatype, described.shape, bytes(data) if small else data))
    if position != len(value):
        raise BadEntry(f"{len(value)} bytes, expected {position}")
    parameters: dict[str, ParameterValue] | None = None if head.parameters is None else dict(head.parameters)
    return CachedResponse(outputs, parameters)


def _check(output: _EncodedOutput, byte_size: int) -> None:
    """Raise `BadEntry` unless an output has the bytes that its datatype and shape need."""
    datatype = DATATYPES.get(output.datatype)
    if datatype is None or min(output.shape, default=0) < 0 or output.byte_size < 0:
        raise BadEntry(f"output '{output.name}' with datatype '{output.datatype}' and shape {output.shape}")
    if byte_size != output.byte_size:
        raise BadEntry(f"output '{output.name}' has {byte_size} bytes, expected {output.byte_size}")
    if datatype.byte_size and math.prod(output.shape) * datatype.byte_size != byte_size:
        raise BadEntry(f"output '{output.name}' has {byte_size} bytes, too few or too many for {output.shape}")
