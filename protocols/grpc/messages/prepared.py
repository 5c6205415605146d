"""Requests that were seen before but for their id and their bytes: a client sends the same kind all the time. Pure.

A message is compared with what is remembered of earlier ones, byte by byte, instead of being parsed,
checked and translated again. What is remembered holds until the catalog of models changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.serving.prepared import PreparedRequest, prepare
from protocols.grpc.messages.raw import varint
from shm.datatypes import DATATYPES
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Sink
    from shm.tensor import Buffer

#: The first bytes of fields of ModelInferRequest: their numbers, all with a length.
_MODEL_NAME, _MODEL_VERSION, _ID = 0x0A, 0x12, 0x1A
_PARAMETERS, _INPUTS, _OUTPUTS, _RAW_CONTENTS = 0x22, 0x2A, 0x32, 0x3A

#: Longer names and ids have a length of two bytes: such a message is parsed.
_SHORT = 0x80

#: What is remembered: forms of a model, models, and how long the repeated part of a message may be.
_FORMS_PER_MODEL = 16
_MODELS = 256
_MAX_REST_BYTE_SIZE = 2048


class PreparedMessage(msgspec.Struct, frozen=True):
    """What the messages of one form have in common."""

    common: PreparedRequest
    #: The message behind the id, up to the contents.
    rest: bytes
    #: For each input the begin of its contents' field, empty for one in shared memory, and their byte size.
    contents: list[tuple[bytes, int]]
    #: Of `rest` and all contents.
    byte_size: int
    wants_empty_final: bool

    def another(self, message: Buffer, start: int, id: str, sink: Sink) -> Request | None:
        """Return the request in `message`, whose contents begin at `start`; None where it is of another form."""
        position = start
        inputs: list[Tensor] = []
        for tensor, (begin, byte_size) in zip(self.common.request.inputs, self.contents, strict=True):
            if begin:
                content = position + len(begin)
                if message[position:content] != begin:
                    return None
                position = content + byte_size
                inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, message[content:position]))
            else:
                inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, None, None, tensor.client_span))
        return self.common.with_inputs(inputs, id, sink)


class PreparedMessages:
    """The forms that one front door has seen."""

    def __init__(self) -> None:
        self._forms: dict[bytes, list[PreparedMessage]] = {}
        self._generation = -1

    def find(self, message: Buffer, generation: int, sink: Sink) -> tuple[Request, PreparedMessage] | None:
        """Return the request in `message` and its form, or None where it has to be parsed.

        `generation` is that of the catalog. The request needs no checks but of its shared memory.
        """
        if generation != self._generation:
            self._forms.clear()
            self._generation = generation
            return None
        found = _split(message)
        if found is None:
            return None
        key, id, position = found
        view: Buffer = message
        if type(message) is not bytes:
            view = memoryview(message)
        for form in self._forms.get(key, ()):
            start = position + len(form.rest)
            if len(message) - position == form.byte_size and view[position:start] == form.rest:
                request = form.another(view, start, id, sink)
                if request is not None:
                    return request, form
        return None

    def announced(self, head: bytes, byte_size: int, generation: int) -> tuple[Model, int] | None:
        """Return the model that a message of `byte_size` bytes is for which begins with `head`, and where in it the
        first contents begin; None where no message was like it so far."""
        if generation != self._generation:
            return None
        found = _split(head)
        if found is None:
            return None
        key, _, position = found
        for form in self._forms.get(key, ()):
            start = position + len(form.rest)
            if byte_size - position == form.byte_size and head[position:start] == form.rest:
                return form.common.model, start + len(next((begin for begin, _ in form.contents if begin), b""))
        return None

    def remember(self, message: Buffer, request: Request, model: Model, *, wants_empty_final: bool = False) -> None:
        """Remember the form of a request that was parsed out of `message` and checked for `model`.

        `Kernel.submit` calls it when it has checked the request, with the catalog as it was when `find` was asked.
        """
        found = _split(message)
        if found is None:
            return
        key, _, position = found
        contents: list[tuple[bytes, int]] = []
        byte_size = 0
        for tensor in request.inputs:
            if tensor.data is None:
                contents.append((b"", 0))
                continue
            if not DATATYPES[tensor.datatype].byte_size:
                return  # of BYTES every request may have other lengths
            begin = bytes((_RAW_CONTENTS,)) + varint(len(tensor.data))
            contents.append((begin, len(tensor.data)))
            byte_size += len(begin) + len(tensor.data)
        end = len(message) - byte_size
        rest = bytes(message[position:end])
        if not 0 < len(rest) <= _MAX_REST_BYTE_SIZE or not _has_only_tensors(rest):
            return
        form = PreparedMessage(prepare(request, model), rest, contents, len(rest) + byte_size, wants_empty_final)
        if form.another(memoryview(message), end, "", request.sink) is None:
            return  # typed contents, or in another order
        if len(self._forms) >= _MODELS:
            self._forms.clear()
        forms = self._forms.setdefault(key, [])
        forms.insert(0, form)
        del forms[_FORMS_PER_MODEL:]


def model_of(head: bytes) -> tuple[str, str] | None:
    """Return name and version of the model that a message begins with, None where they do not stand there."""
    found = _split(head)
    if found is None:
        return None
    key = found[0]
    name_end = 2 + key[1]
    try:
        return key[2:name_end].decode(), key[name_end + 2 :].decode()
    except UnicodeDecodeError:
        return None


def _split(message: Buffer) -> tuple[bytes, str, int] | None:
    """Return the fields of name and version, the id, and where it ends; None for a message of another kind."""
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


def _has_only_tensors(rest: bytes) -> bool:
    """Whether `rest` consists of parameters, inputs and outputs: nothing that could stand elsewhere as well."""
    position = 0
    while position < len(rest):
        if rest[position] not in (_PARAMETERS, _INPUTS, _OUTPUTS):
            return False
        length = shift = 0
        while True:
            position += 1
            if position >= len(rest) or shift > 28:
                return False
            length |= (rest[position] & 0x7F) << shift
            shift += 7
            if rest[position] < _SHORT:
                break
        position += 1 + length
    return position == len(rest)
