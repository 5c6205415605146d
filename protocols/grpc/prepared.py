"""Requests that differ from an earlier one only in their id and their tensors, made without parsing them. Pure.

Clients send the same kind of request again and again. Its message is compared byte by byte with the messages of earlier
requests, and the prepared request of a matching one is used: it was parsed, checked and translated already. What was
prepared is valid until the catalog of models changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.serving.prepared import PreparedCache, PreparedRequest, prepare
from protocols.grpc.framing import CompressedMessage, RefusedMessage
from protocols.grpc.wire_format import read_varint, varint
from shm.datatypes import DATATYPES
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.serving.request import Request
    from kernel.serving.response import Sink
    from kernel.serving.route import ModelRoute
    from protocols.grpc.framing import ReceivedMessage
    from shm.tensor import Buffer

#: The first bytes of fields of ModelInferRequest: their numbers, all with a length.
_MODEL_NAME, _MODEL_VERSION, _ID = 0x0A, 0x12, 0x1A
_PARAMETERS, _INPUTS, _OUTPUTS, _RAW_CONTENTS = 0x22, 0x2A, 0x32, 0x3A

#: Longer names and ids have a length of two bytes: such a message is parsed.
_SHORT = 0x80

#: How many models, and messages of each, are kept, and how long the repeated part of a message may be.
_MAX_MODELS = 256
_MAX_MESSAGES_PER_MODEL = 16
_MAX_REPEATED_BYTE_SIZE = 2048


class PreparedMessage(msgspec.Struct, frozen=True):
    """A prepared request, with what its messages have in common."""

    common: PreparedRequest
    #: The bytes of such a message from behind its id up to the contents of its tensors.
    repeated: bytes
    #: For each input the first bytes of the field of its contents, empty for one in shared memory, and their byte size.
    contents: list[tuple[bytes, int]]
    #: Of `repeated` and all contents with their fields.
    byte_size: int
    wants_empty_final: bool
    #: Whether the model is decoupled.
    decoupled: bool

    def inputs_in(self, message: Buffer, start: int) -> list[Tensor] | None:
        """Return the inputs in `message`, whose contents begin at `start`; None if they are not as expected."""
        position = start
        inputs: list[Tensor] = []
        for tensor, (field_start, byte_size) in zip(self.common.request.inputs, self.contents, strict=True):
            if field_start:
                content = position + len(field_start)
                if message[position:content] != field_start:
                    return None
                position = content + byte_size
                inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, message[content:position]))
            else:
                inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, None, None, tensor.client_span))
        return inputs


class PreparedMessages:
    """The prepared messages of one RPC, by their model."""

    def __init__(self) -> None:
        self._cache: PreparedCache[bytes, list[PreparedMessage]] = PreparedCache(_MAX_MODELS)

    def match(
        self, head: object, message: ReceivedMessage, generation: int, sink: Sink
    ) -> tuple[Request, PreparedMessage] | None:
        """Return the request in `message` and what it was prepared by, None if the message has to be decoded.

        The head of the call says nothing about its message. `generation` is the catalog's. Only the shared memory
        of the request is still to be checked.
        """
        cache = self._cache
        if generation != cache.generation:
            cache.start_generation(generation)
            return None
        view: Buffer
        if type(message) is bytes:
            view = message
        elif isinstance(message, (CompressedMessage, RefusedMessage)):
            return None
        else:
            view = memoryview(message)
        fields = _first_fields(message)
        if fields is None:
            return None
        key, id, position = fields
        for known in cache.entries.get(key, ()):
            start = position + len(known.repeated)
            if len(message) - position == known.byte_size and view[position:start] == known.repeated:
                inputs = known.inputs_in(view, start)
                if inputs is not None:
                    return known.common.with_inputs(inputs, id, sink), known
        return None

    def match_start(self, message_start: bytes, byte_size: int, generation: int) -> tuple[ModelRoute, int] | None:
        """Return the route of a message of which only the start has arrived, and where in it the first contents begin.

        `byte_size` is the size of the whole message. None if no earlier message began like it.
        """
        if generation != self._cache.generation:
            return None
        fields = _first_fields(message_start)
        if fields is None:
            return None
        key, _, position = fields
        for known in self._cache.entries.get(key, ()):
            start = position + len(known.repeated)
            if byte_size - position == known.byte_size and message_start[position:start] == known.repeated:
                first_field = next((field_start for field_start, _ in known.contents if field_start), b"")
                return known.common.route, start + len(first_field)
        return None

    def add(self, message: Buffer, request: Request, route: ModelRoute, *, wants_empty_final: bool = False) -> None:
        """Keep a request that was parsed from `message` and fits `route`, if it can be used again.

        The catalog is as `match` has last seen it.
        """
        fields = _first_fields(message)
        if fields is None:
            return
        key, _, position = fields
        contents: list[tuple[bytes, int]] = []
        byte_size = 0
        for tensor in request.inputs:
            if tensor.data is None:
                contents.append((b"", 0))
                continue
            if not DATATYPES[tensor.datatype].byte_size:
                return  # the size of BYTES differs from request to request
            field_start = bytes((_RAW_CONTENTS,)) + varint(len(tensor.data))
            contents.append((field_start, len(tensor.data)))
            byte_size += len(field_start) + len(tensor.data)
        end = len(message) - byte_size
        repeated = bytes(message[position:end])
        if not 0 < len(repeated) <= _MAX_REPEATED_BYTE_SIZE or not _has_only_tensors(repeated):
            return
        common, total = prepare(request, route), len(repeated) + byte_size
        added = PreparedMessage(common, repeated, contents, total, wants_empty_final, route.spec.decoupled)
        if added.inputs_in(memoryview(message), end) is None:
            return  # typed contents, or in another order
        others = self._cache.entries.get(key, [])
        self._cache.add(key, [added, *others[: _MAX_MESSAGES_PER_MODEL - 1]])


def model_of(message_start: bytes) -> tuple[str, str] | None:
    """Return name and version of the model that a message begins with, None if they do not stand there."""
    fields = _first_fields(message_start)
    if fields is None:
        return None
    key = fields[0]
    name_end = 2 + key[1]
    try:
        return key[2:name_end].decode(), key[name_end + 2 :].decode()
    except UnicodeDecodeError:
        return None


def names_at_start(message_start: bytes) -> tuple[str, str, str]:
    """Return model, version and id at the start of a message; empty texts where they do not stand there."""
    fields = _first_fields(message_start)
    target = model_of(message_start)
    if fields is None or target is None:
        return "", "", ""
    return *target, fields[1]


def _first_fields(message: Buffer) -> tuple[bytes, str, int] | None:
    """Return the fields of name and version, the id, and where it ends; None if the message begins otherwise."""
    try:
        if message[0] != _MODEL_NAME or message[1] >= _SHORT:
            return None
        position = 2 + message[1]
        if message[position] == _MODEL_VERSION:
            if message[position + 1] >= _SHORT:
                return None
            position += 2 + message[position + 1]
        key = bytes(message[:position])
        if message[position] != _ID:
            return key, "", position
        length = message[position + 1]
        if length >= _SHORT:
            return None
        start = position + 2
        return key, str(message[start : start + length], "utf-8"), start + length
    except (IndexError, UnicodeDecodeError):
        return None


def _has_only_tensors(octets: bytes) -> bool:
    """Whether `octets` are parameters, inputs and outputs: no fields that could stand elsewhere as well."""
    view, position = memoryview(octets), 0
    while position < len(view):
        if view[position] not in (_PARAMETERS, _INPUTS, _OUTPUTS):
            return False
        length, position = read_varint(view, position + 1)
        position += length
    return position == len(view)
