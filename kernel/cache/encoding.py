"""Responses as bytes, for caches outside of the server. Pure.

A value is a checksum of what follows (CRC-32), the size of the head, the head (msgpack), and the bytes of the outputs
one after the other. Any program with access to the store can write a value. So a value is checked against the model
before objects are made of it. One that the model could not have sent is ignored, as is one that is damaged, or that
another version of the server has written. With a signing key (`kernel.cache.stored`), only programs that have the key
can write a value.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from kernel.cache.interface import CachedResponse
from kernel.texts import limited
from shm.arena import INLINE_LIMIT
from shm.datatypes import DATATYPES
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from kernel.serving.response import ParameterValue

#: The format of values. It is part of the keys, so that servers with different formats do not see each other's.
FORMAT = 1

#: The most elements of type BYTES in a response, and how many are checked in one piece: each takes about 0.1 µs, and
#: 0.25 µs on slow machines.
MAX_STRINGS = 1 << 15
STRINGS_AT_ONCE = 1 << 12

#: Responses with more dimensions of an output, or more parameters, are not stored.
_MAX_DIMS = 64
_MAX_PARAMETERS = 256

_FRONT = struct.Struct("<II")

#: The length of an element of type BYTES.
STRING_LENGTH = struct.Struct("<I")

#: How a head begins in msgpack.
_ARRAY_OF_2 = b"\x92"


class BadEntry(ValueError):
    """A value of a cache is not a response that this server has stored."""


class _EncodedOutput(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    datatype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[list[int], msgspec.Meta(max_length=_MAX_DIMS)]
    byte_size: int


class _Head(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    outputs: list[_EncodedOutput]
    parameters: Annotated[dict[str, str | int | bool | float], msgspec.Meta(max_length=_MAX_PARAMETERS)] | None


_encoder = msgspec.msgpack.Encoder()
head_decoder = msgspec.msgpack.Decoder(_Head)


def can_be_stored(
    outputs: Sequence[Tensor], parameters: Mapping[str, ParameterValue] | None, expected: Mapping[str, str]
) -> bool:
    """Whether `decode` takes the response, where `expected` has the datatypes of the model's outputs by name."""
    return (
        len(parameters or ()) <= _MAX_PARAMETERS
        and len({each.name for each in outputs}) == len(outputs)
        and all(expected.get(each.name) == each.datatype and len(each.shape) <= _MAX_DIMS for each in outputs)
        and sum(math.prod(each.shape) for each in outputs if each.datatype == "BYTES") <= MAX_STRINGS
    )


def encode(outputs: Sequence[Tensor], parameters: dict[str, ParameterValue] | None) -> bytes:
    """Return a response as bytes. The outputs are inline or in arenas."""
    described = [_EncodedOutput(each.name, each.datatype, each.shape, each.byte_size) for each in outputs]
    head = _encoder.encode(_Head(described, parameters))
    parts = [head, *(each.raw() for each in outputs)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join((_FRONT.pack(checksum, len(head)), *parts))


def decode(value: bytes | memoryview, expected: Mapping[str, str]) -> CachedResponse:
    """Return the response, as `decode_in_pieces`, but in one piece of work."""
    pieces = decode_in_pieces(value, expected)
    try:
        while True:
            next(pieces)
    except StopIteration as end:
        response: CachedResponse = end.value
        return response


def decode_in_pieces(value: bytes | memoryview, expected: Mapping[str, str]) -> Generator[None, None, CachedResponse]:
    """Return the response; yields where other work can be done. Large outputs are views of `value`.

    `expected` has the datatypes, by name, of the outputs that the response may have. Raises `BadEntry`; that takes no
    longer than it takes to read the response that the model could have sent.
    """
    if len(value) < _FRONT.size:
        raise BadEntry(f"{len(value)} bytes, expected at least {_FRONT.size}")
    checksum, head_size = _FRONT.unpack_from(value)
    view = memoryview(value)
    if zlib.crc32(view[_FRONT.size :]) != checksum:
        raise BadEntry("a wrong checksum")
    position = _FRONT.size + head_size
    head = _decoded_head(view[_FRONT.size : position], len(expected))
    outputs: list[Tensor] = []
    string_count = 0
    for described in head.outputs:
        if expected.get(described.name) != described.datatype:
            raise BadEntry(f"output '{limited(described.name, 100)}', which the model does not have so")
        if any(described.name == each.name for each in outputs):
            raise BadEntry(f"output '{described.name}' twice")
        data = view[position : position + described.byte_size]
        _check(described, len(data))
        if described.datatype == "BYTES":
            string_count += math.prod(described.shape)
            yield from _check_strings(described, data, string_count)
        position += described.byte_size
        small = described.byte_size <= INLINE_LIMIT
        outputs.append(Tensor(described.name, described.datatype, described.shape, bytes(data) if small else data))
    if position != len(value):
        raise BadEntry(f"{len(value)} bytes, expected {position}")
    parameters: dict[str, ParameterValue] | None = None if head.parameters is None else dict(head.parameters)
    return CachedResponse(outputs, parameters)


def _decoded_head(head: memoryview, most_outputs: int) -> _Head:
    """Return the head. Raises `BadEntry`, before anything is made of more outputs than the model has."""
    count = _array_size(head[1:]) if head[:1] == _ARRAY_OF_2 else -1
    if not 0 <= count <= most_outputs:
        raise BadEntry(f"{count} outputs, expected at most {most_outputs}" if count >= 0 else "a head that is no head")
    try:
        return head_decoder.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadEntry(f"a head that cannot be read: {error}") from None


def _array_size(encoded: memoryview) -> int:
    """Return how many elements the array of msgpack has that begins here; -1 if none does."""
    kind = encoded[0] if encoded else 0
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    byte_size = {0xDC: 2, 0xDD: 4}.get(kind, 0)
    return int.from_bytes(encoded[1 : 1 + byte_size], "big") if byte_size else -1


def _check(output: _EncodedOutput, byte_size: int) -> None:
    """Raise `BadEntry` unless an output has the bytes that its datatype and shape need."""
    datatype = DATATYPES.get(output.datatype)
    if datatype is None or min(output.shape, default=0) < 0 or output.byte_size < 0:
        raise BadEntry(f"output '{output.name}' with datatype '{output.datatype}' and shape {output.shape}")
    if byte_size != output.byte_size:
        raise BadEntry(f"output '{output.name}' has {byte_size} bytes, expected {output.byte_size}")
    if datatype.byte_size and math.prod(output.shape) * datatype.byte_size != byte_size:
        raise BadEntry(f"output '{output.name}' has {byte_size} bytes, too few or too many for {output.shape}")


def _check_strings(output: _EncodedOutput, data: memoryview, count_of_all: int) -> Generator[None, None, None]:
    """Raise `BadEntry` unless the elements of an output of type BYTES end where their lengths say, and are as many as
    its shape needs."""
    if count_of_all > MAX_STRINGS:
        raise BadEntry(f"{count_of_all} elements of type BYTES, expected at most {MAX_STRINGS}")
    position, unpack, left = 0, STRING_LENGTH.unpack_from, math.prod(output.shape)
    done = count_of_all - left
    try:
        while left:
            piece = min(left, STRINGS_AT_ONCE - done % STRINGS_AT_ONCE)
            for _ in range(piece):
                position += STRING_LENGTH.size + unpack(data, position)[0]
            left, done = left - piece, done + piece
            if not done % STRINGS_AT_ONCE:
                yield
    except struct.error:  # the length is not in the data
        position = -1
    if position != len(data):
        raise BadEntry(f"output '{output.name}' of type BYTES whose lengths contradict its {len(data)} bytes")
