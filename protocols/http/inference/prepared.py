"""Prepared requests for bodies whose JSON was seen before, except for the id and data: clients repeat it. Pure.

The JSON is looked up and not parsed, checked and translated again: here where all tensors are binary data or in shared
memory, in `prepared_json` where data is in the JSON. A prepared body is valid until the catalog of models changes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.serving.prepared import PreparedRequest, prepare
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.json_response_template import JsonResponseTemplate
from protocols.http.inference.prepared_json import DATA, MAX_BYTE_SIZE, PreparedJsonBodies, PreparedJsonBody
from protocols.http.inference.response_template import ResponseTemplate
from protocols.prepared_cache import PreparedCache
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.serving.front_doors.route import ModelRoute
    from kernel.serving.request import Request
    from kernel.serving.response import Sink
    from protocols.http.inference.codec import OutputFormat
    from protocols.http.inference.head import InferRequestHead

#: How JSON of the usual clients begins that has an id, up to the end of an id in which nothing is escaped. JSON
#: that begins in another way is looked up as a whole, with its id where that stands elsewhere.
_ID = re.compile(rb'\{"id": ?"([ !#-\[\]-~]*)(?=")')

#: How many prepared bodies are kept, and how long their JSON may be.
_MAX_BODIES = 1024
_MAX_JSON_BYTE_SIZE = 2048

#: Bodies up to this size are cut into copies; of larger ones inputs keep views.
_SMALL_BYTE_SIZE = 16 << 10

#: A body that has come in one piece, in a buffer of its own, or in memory of its model.
RequestBody = bytes | bytearray | memoryview


class PreparedBody(msgspec.Struct, frozen=True):
    """What bodies have in common whose JSON is the same except for the id."""

    common: PreparedRequest
    outputs: OutputFormat
    #: The bytes of each input behind the JSON, -1 for one in shared memory, and of all.
    byte_sizes: list[int]
    byte_size: int
    #: How the last response was written; None where responses are compressed.
    template: ResponseTemplate | JsonResponseTemplate | None


class PreparedBodies:
    """The prepared bodies of one HTTP server, by `InferRequestHead.prepared_key` and the JSON without its id."""

    def __init__(self, max_input_size: int) -> None:
        """`max_input_size` is how many bytes an input in JSON may have."""
        self._cache: PreparedCache[tuple[str, bytes], PreparedBody] = PreparedCache(_MAX_BODIES)
        self._json = PreparedJsonBodies(max_input_size)

    def match(
        self, head: InferRequestHead, body: RequestBody, generation: int, sink: Sink
    ) -> tuple[Request, PreparedBody | PreparedJsonBody] | None:
        """Return the request in `body` and what it was made from, or None if it has to be parsed.

        `generation` is that of the catalog. The request needs no checks but of its shared memory.
        """
        cache = self._cache
        if generation != cache.generation:
            cache.start_generation(generation)
            self._json.start_generation(generation)
            return None
        start = head.header_length
        if start > MAX_BYTE_SIZE:
            return None
        # As in `add`; a function for both would be a call for every request.
        id = _ID.match(body, 0, start)
        begin = 0 if id is None else id.end()
        if start == len(body) and type(body) is bytes and (first_data := body.find(DATA, begin)) >= 0:
            text_of_id = "" if id is None else id[1].decode()
            found = self._json.match(head.prepared_key, body, begin, first_data, text_of_id, sink)
            if found is not None:
                return found
        if start > _MAX_JSON_BYTE_SIZE:
            return None
        prepared = cache.entries.get((head.prepared_key, bytes(body[begin:start])))
        byte_size = len(body)
        if prepared is None or byte_size - start != prepared.byte_size:
            return None
        small = byte_size <= _SMALL_BYTE_SIZE and type(body) is bytes
        view = body if small else memoryview(body)
        inputs: list[Tensor] = []
        for tensor, byte_size in zip(prepared.common.request.inputs, prepared.byte_sizes, strict=True):
            if byte_size < 0:
                inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, None, None, tensor.client_span))
                continue
            end = start + byte_size
            inputs.append(Tensor(tensor.name, tensor.datatype, tensor.shape, view[start:end]))
            start = end
        return prepared.common.with_inputs(inputs, "" if id is None else id[1].decode(), sink), prepared

    def add(
        self, head: InferRequestHead, body: RequestBody, outputs: OutputFormat, request: Request, route: ModelRoute
    ) -> None:
        """Keep a request that was parsed from `body` and fits `route`, if it can be recognised.

        The catalog is as `match` has last seen it.
        """
        length = head.header_length
        if not 0 < length <= MAX_BYTE_SIZE:
            return
        id = _ID.match(body, 0, length)
        if id is not None and request.id != id[1].decode():
            return  # a second id counts
        sizes = [-1 if tensor.data is None else len(tensor.data) for tensor in request.inputs]
        if any(tensor.data is not None and type(tensor.data) is not memoryview for tensor in request.inputs):
            if length == len(body):  # all data is in JSON
                common = prepare(request, route)
                template = _template(head, outputs.any_binary)
                self._json.add(head.prepared_key, bytes(body), id, common, request, outputs, template)
            return
        rest = bytes(body[0 if id is None else id.end() : length])
        if length > _MAX_JSON_BYTE_SIZE or (id is None and request.id):
            return
        if id is not None and (b'"id"' in rest or b"\\" in rest):
            return  # a second id, which would count, may hide behind an escape
        common = prepare(request, route)
        template = _template(head, outputs.any_binary or common.uses_client_regions)
        total = sum(size for size in sizes if size > 0)
        self._cache.add((head.prepared_key, rest), PreparedBody(common, outputs, sizes, total, template))


def _template(head: InferRequestHead, in_binary: bool) -> ResponseTemplate | JsonResponseTemplate | None:
    """Return the template for responses in which no outputs are JSON, or else for such in which all are."""
    if head.encoding != IDENTITY:
        return None
    return ResponseTemplate() if in_binary else JsonResponseTemplate()
