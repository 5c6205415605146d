"""Templates for responses that differ from the one before only in the id and the values of their outputs. Pure.

What stands in front of the outputs or around them, in the HTTP head and in the JSON, is kept and not encoded again:
by `ResponseTemplate` where all outputs are binary data, by `JsonResponseTemplate` where all are JSON. Values in JSON
are written as they are without a template, digit for digit.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, ServingError
from protocols.http.inference.encoding import json_around_data
from protocols.http.json.tensor import ELEMENT_TYPES, NeedsCare, json_values
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.serving.response import Response
    from shm.tensor import Buffer, Tensor

#: Longer JSON is not kept.
_MAX_JSON_BYTE_SIZE = 2048

#: What JSON with an id begins with.
_ID = b'{"id":'

_encode = msgspec.json.Encoder().encode


class ResponseTemplate:
    """How the last response to requests of one prepared body was written."""

    __slots__ = ("_head", "_id_byte_size", "_model", "_outputs", "_parameters", "_rest", "_written_s")

    def __init__(self) -> None:
        #: When the response was written: its head holds the time.
        self._written_s = -1.0
        self._model = ("", "")
        #: The JSON of its parameters; ensembles add the sequence's to every response. Compared as JSON, because
        #: 1 equals True in Python.
        self._parameters = b""
        #: Name, datatype, shape and byte size of each output; -1 for one in the client's region.
        self._outputs: list[tuple[str, str, list[int], int]] = []
        #: What stands before the id, how long that was, and the JSON behind it.
        self._head = b""
        self._id_byte_size = 0
        self._rest = b""

    def fill_in(self, response: Response, now_s: float) -> bytes | None:
        """Return the HTTP response for `response`, with a copy of its outputs; None where more differs.

        `now_s` is a time that stays the same for as long as the time in a head may.
        """
        outputs = response.outputs
        id = _encode(response.id) if response.id else b""
        if (
            now_s != self._written_s
            or outputs is None
            or len(outputs) != len(self._outputs)
            or len(id) != self._id_byte_size
            or (response.model_name, response.model_version) != self._model
            or (_encode(response.parameters) if response.parameters else b"") != self._parameters
        ):
            return None
        pieces: list[Buffer] = [self._head, id, self._rest]
        for output, (name, datatype, shape, byte_size) in zip(outputs, self._outputs, strict=True):
            data = output.data
            if data is None:
                data = output.response_bytes()
            if data is None:
                if byte_size != -1:
                    return None
            elif len(data) == byte_size:
                pieces.append(data)
            else:
                return None
            if output.shape != shape or output.name != name or output.datatype != datatype:
                return None
        return b"".join(pieces)

    def remember(self, response: Response, body: Sequence[Buffer], head: bytes, now_s: float) -> None:
        """Make the template of `response`, which was written as `head` and `body`, if all its outputs are binary.

        The first part of `body` is JSON; the others are the outputs.
        """
        header = bytes(body[0])
        if len(header) > _MAX_JSON_BYTE_SIZE:
            return
        binary_count = 0
        outputs: list[tuple[str, str, list[int], int]] = []
        for output in response.outputs or ():
            byte_size = -1
            data = output.response_bytes()
            if data is not None:
                if output.datatype == "BYTES":
                    return  # the next one may have another length
                byte_size = len(data)
                binary_count += 1
            outputs.append((output.name, output.datatype, list(output.shape), byte_size))
        if binary_count != len(body) - 1:
            return  # others are part of the JSON
        self._outputs = outputs
        id = _encode(response.id) if response.id else b""
        self._parameters = _encode(response.parameters) if response.parameters else b""
        self._id_byte_size = len(id)
        begin = len(_ID) if id else 0
        self._head, self._rest = head + header[:begin], header[begin + len(id) :]
        self._model = response.model_name, response.model_version
        self._written_s = now_s


#: Outputs with more bytes are not written by a template: strings may have any length.
_MAX_OUTPUTS_BYTE_SIZE = 16 << 10

#: From this many elements on, floats are written faster by `json_values`, which takes a few calls more.
_MANY_FLOATS = 64


class _KnownOutput(msgspec.Struct, frozen=True):
    """An output of the last response, and how the data of the next one is read."""

    name: str
    datatype: str
    shape: list[int]
    #: Returns the elements in a buffer of the right size, else raises `struct.error`. None for BYTES, and for an output
    #: in the client's region.
    unpack: Callable[[Buffer], tuple[Any, ...]] | None
    #: Whether elements may be infinite or not a number, which is not written by msgspec.
    is_float: bool
    in_region: bool
    #: The JSON behind the values.
    behind: bytes
    #: How many elements a float output has that is written as without a template, which is faster; 0 for others.
    count: int = 0


class JsonResponseTemplate:
    """How the last response to requests of one prepared body was written, all of whose outputs are JSON."""

    __slots__ = ("_head", "_head_rest", "_model", "_outputs", "_parameters", "_rest", "_with_id", "_written_s")

    def __init__(self) -> None:
        #: When the response was written: its head holds the time.
        self._written_s = -1.0
        self._model = ("", "")
        #: The JSON of its parameters, compared as in `ResponseTemplate`.
        self._parameters = b""
        self._outputs: list[_KnownOutput] = []
        #: The HTTP head before and behind the number of bytes, and the JSON from the id to the first values.
        self._head = self._head_rest = self._rest = b""
        self._with_id = False

    def fill_in(self, response: Response, now_s: float) -> bytes | None:
        """Return the HTTP response for `response`; None where more differs than values and id, or values are unusual.

        `now_s` is a time that stays the same for as long as the time in a head may.
        """
        outputs, id = response.outputs, response.id
        if (
            now_s != self._written_s
            or outputs is None
            or len(outputs) != len(self._outputs)
            or (id != "") is not self._with_id
            or (response.model_name, response.model_version) != self._model
            or (_encode(response.parameters) if response.parameters else b"") != self._parameters
        ):
            return None
        pieces = [_ID, _encode(id), self._rest] if id else [self._rest]
        try:
            for output, known in zip(outputs, self._outputs, strict=True):
                if output.shape != known.shape or output.name != known.name or output.datatype != known.datatype:
                    return None
                data = output.data
                if data is None:
                    data = output.response_bytes()
                if known.in_region:
                    if data is not None:
                        return None
                    continue
                if data is None:
                    return None
                if known.count:
                    pieces.append(_values(output, data, known.count))
                elif known.unpack is None:
                    pieces.append(_strings(output, data))
                else:
                    values = known.unpack(data)
                    if known.is_float and not math.isfinite(sum(values)):
                        return None
                    pieces.append(_encode(values))
                pieces.append(known.behind)
        except (struct.error, ServingError, NeedsCare):
            return None
        body = b"".join(pieces)
        return b"%b%d%b%b" % (self._head, len(body), self._head_rest, body)

    def remember(self, response: Response, body: Sequence[Buffer], head: bytes, now_s: float) -> None:
        """Make the template of `response`, which was written as `head` and `body`, if all its outputs are JSON."""
        if len(body) != 1:
            return
        pieces = json_around_data(response)
        length = b"Content-Length: %d\r\n" % len(body[0])
        before, found, behind = head.rpartition(length)
        outputs = response.outputs or ()
        if not found or sum(map(len, pieces)) > _MAX_JSON_BYTE_SIZE or not _are_small(outputs):
            return
        id = _encode(response.id) if response.id else b""
        following = iter(pieces)
        first = next(following)
        self._rest = first[len(_ID) + len(id) :] if id else first
        self._with_id = bool(id)
        self._head, self._head_rest = before + b"Content-Length: ", b"\r\n" + behind
        self._outputs = [
            _KnownOutput(
                output.name,
                output.datatype,
                list(output.shape),
                None if in_region else _unpack(output),
                DATATYPES[output.datatype].typecode in ("f", "d"),
                in_region,
                b"" if in_region else next(following),
                0 if in_region else _many_floats(output),
            )
            for output in outputs
            for in_region in [output.response_bytes() is None]
        ]
        self._parameters = _encode(response.parameters) if response.parameters else b""
        self._model = response.model_name, response.model_version
        self._written_s = now_s


def _are_small(outputs: Sequence[Tensor]) -> bool:
    byte_size = sum(output.byte_size for output in outputs if output.region_of_client is None)
    return byte_size <= _MAX_OUTPUTS_BYTE_SIZE and all(output.datatype in ELEMENT_TYPES for output in outputs)


def _unpack(output: Tensor) -> Callable[[Buffer], tuple[Any, ...]] | None:
    """Return what reads the numbers of outputs like this one; None for strings."""
    typecode = DATATYPES[output.datatype].typecode
    return struct.Struct(f"<{element_count(output.shape)}{typecode}").unpack if typecode else None


def _many_floats(output: Tensor) -> int:
    """Return the number of elements of an output whose values `_values` writes; 0 for any other output."""
    count = element_count(output.shape)
    return count if count >= _MANY_FLOATS and DATATYPES[output.datatype].typecode in ("f", "d") else 0


def _values(output: Tensor, data: Buffer, count: int) -> bytes:
    """Return the JSON of floats. Raises `ServingError`, and `NeedsCare` for infinite ones and NaN."""
    values = json_values(output.name, output.datatype, data, count, plain_only=True)
    return bytes(values) if type(values) is msgspec.Raw else _encode(values)


def _strings(output: Tensor, data: Buffer) -> bytes:
    """Return the JSON of BYTES. Raises `ServingError`."""
    if len(data) > _MAX_OUTPUTS_BYTE_SIZE:
        raise InternalError(f"output '{output.name}' is large")
    return _encode(json_values(output.name, output.datatype, data, element_count(output.shape)))
