"""Requests whose JSON was seen before but for the id: a client sends the same kind all the time. Pure.

The JSON is looked up instead of being parsed, checked and translated again, where all tensors are binary data
or in shared memory. What is remembered holds until the catalog of models changes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.serving.prepared import PreparedRequest, prepare
from protocols.http.fast.response_template import ResponseTemplate
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Sink
    from protocols.http.codec import OutputForm
    from protocols.http.fast.request_head import InferHead

#: How JSON of the usual clients begins that has an id, up to the end of one in which nothing is escaped. JSON
#: without it is of a form as a whole, also where an id stands elsewhere.
_ID = re.compile(rb'\{"id": ?"([ !#-\[\]-~]*)(?=")')

#: What is remembered, and how long the JSON may be.
_FORMS = 1024
_MAX_JSON_BYTE_SIZE = 2048

#: Bodies up to here are cut into copies; of larger ones inputs keep views.
_SMALL_BYTE_SIZE = 16 << 10

#: A body that has come in one piece, in a buffer of its own, or in memory of its model.
RequestBody = bytes | bytearray | memoryview

#: Model and version as the client gave them, and the JSON without its id.
Key = tuple[str, str, bytes]


class PreparedBody(msgspec.Struct, frozen=True):
    """What the bodies of one form have in common."""

    common: PreparedRequest
    outputs: OutputForm
    #: The bytes of each input behind the JSON, -1 for one in shared memory, and of all.
    byte_sizes: list[int]
    byte_size: int
    #: What the last answer was, which the next will be like.
    answer: ResponseTemplate


class PreparedBodies:
    """The forms that the lane has seen."""

    def __init__(self) -> None:
        self._forms: dict[Key, PreparedBody] = {}
        self._generation = -1

    def find(
        self, head: InferHead, body: RequestBody, generation: int, sink: Sink
    ) -> tuple[Request, PreparedBody] | None:
        """Return the request in `body` and its form, or None where it has to be parsed.

        `generation` is that of the catalog. The request needs no checks but of its shared memory.
        """
        if generation != self._generation:
            self._forms.clear()
            self._generation = generation
            return None
        start = head.header_length
        if start > _MAX_JSON_BYTE_SIZE:
            return None
        # As in `remember`; a function for both would be a call for every request.
        id = _ID.match(body, 0, start)
        begin = 0 if id is None else id.end()
        form = self._forms.get((head.model, head.version, bytes(body[begin:start])))
        byte_size = len(body)
        if form is None or byte_size - start != form.byte_size:
            return None
        small = byte_size <= _SMALL_BYTE_SIZE and type(body) is bytes
        view = body if small else memoryview(body)
        inputs: list[Tensor] = []
        for tensor, byte_size in zip(form.common.request.inputs, form.byte_sizes, strict=True):
            if byte_size < 0:
                inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, None, None, tensor.client_span))
                continue
            end = start + byte_size
            inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, view[start:end]))
            start = end
        return form.common.with_inputs(inputs, "" if id is None else id[1].decode(), sink), form

    def remember(self, head: InferHead, body: RequestBody, outputs: OutputForm, request: Request, model: Model) -> None:
        """Remember the form of a request that was parsed out of `body` and checked for `model`.

        `Kernel.submit` calls it when it has checked the request, with the catalog as it was when `find` was asked.
        """
        if not 0 < head.header_length <= _MAX_JSON_BYTE_SIZE:
            return
        id = _ID.match(body, 0, head.header_length)
        begin = 0 if id is None else id.end()
        rest = bytes(body[begin : head.header_length])
        if request.id != ("" if id is None else id[1].decode()):
            return
        if id is not None and (b'"id"' in rest or b"\\" in rest):
            return  # a second id, which would count, may hide behind an escape
        if any(tensor.data is not None and type(tensor.data) is not memoryview for tensor in request.inputs):
            return  # data in JSON
        sizes = [-1 if tensor.data is None else len(tensor.data) for tensor in request.inputs]
        if len(self._forms) >= _FORMS:
            self._forms.clear()
        total = sum(size for size in sizes if size > 0)
        form = PreparedBody(prepare(request, model), outputs, sizes, total, ResponseTemplate())
        self._forms[head.model, head.version, rest] = form
