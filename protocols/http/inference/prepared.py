"""Prepared requests for bodies whose JSON was seen before, except for the id and data: clients repeat it. Pure.

The JSON is looked up and not parsed, checked and translated again. `InferRequestHead` has what the head says, found
once for all requests with the same head. `PreparedBodies` knows bodies whose tensors are all binary data or in shared
memory; bodies with data in JSON are behind it, in `PreparedJsonBodies`. What is prepared is valid until the catalog of
models changes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kernel.serving.prepared import PreparedCache, PreparedRequest, prepare
from kernel.serving.request import REQUEST_BYTE_SIZE
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.decoding import OutputFormat  # noqa: TC001 - msgspec reads it
from protocols.http.inference.response_templates import JsonResponseTemplate, ResponseTemplate
from protocols.http.json.document import UNDECODABLE
from protocols.http.json.skeleton import STRING, Hole, JsonSkeleton, find_value, make_skeleton, tensor_reader
from shm.arena import INLINE_LIMIT
from shm.datatypes import element_count
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.serving.request import Request
    from kernel.serving.response import Sink
    from kernel.serving.route import ModelRoute
    from protocols.forwarding import ForwardedHeaders


class InferRequestHead(msgspec.Struct, frozen=True):
    """The facts of a head that the request behind it needs. `route` holds until the catalog of models changes."""

    route: ModelRoute
    #: Name and version as the client gave them, and the request target as it was sent.
    model_name: str
    model_version: str
    target: str
    body_byte_size: int
    #: Bytes of the body that are JSON; 0 for a raw request, whose body is a tensor as a whole.
    header_length: int
    #: The content coding of the response.
    encoding: str
    #: Headers that become parameters of the request; None if there are none.
    forwarded: ForwardedHeaders | None = None
    #: All headers as they were sent, names and values.
    headers: tuple[tuple[bytes, bytes], ...] = ()
    #: Lines that the head of every response carries, with their ends (CORS).
    response_headers: bytes = b""
    #: Whether the client wants to know how the request travels (`X-Naiad-Explain`).
    explain: bool = False
    #: Requests whose heads have the same key, and whose JSON is the same except for the id, share a prepared request
    #: and a response template. A text: its hash is computed once.
    prepared_key: str = ""

    def __post_init__(self) -> None:
        parts = (self.model_name, self.model_version, self.encoding, self.response_headers.decode("latin-1"))
        key = "\n".join((*parts, "explained") if self.explain else parts)
        msgspec.structs.force_setattr(self, "prepared_key", key)


#: How JSON of the usual clients begins that has an id, up to the end of an id in which nothing is escaped. JSON
#: that begins in another way is looked up as a whole, with its id where that stands elsewhere.
_ID = re.compile(rb'\{"id": ?"([ !#-\[\]-~]*)(?=")')

#: How many prepared bodies are kept, and how long their JSON may be.
MAX_BODIES = 1024

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
        self._cache: PreparedCache[tuple[str, bytes], PreparedBody] = PreparedCache(MAX_BODIES)
        self._json = PreparedJsonBodies(max_input_size)

    def match(
        self, head: InferRequestHead, body: RequestBody, generation: int, sink: Sink
    ) -> tuple[Request, PreparedBody | PreparedJsonBody] | None:
        """Return the request in `body` and what it was made from, or None if it has to be parsed.

        `generation` is the catalog's. The request needs no checks but of its shared memory.
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


# ---- data in JSON ----------------------------------------------------------------------------


#: The name of a member with data, up to which bodies are looked up.
DATA = b'"data"'

#: Longer bodies are left to the parser: decoding them takes longer than finding out what they are. Numbers of this size
#: take the event loop 0.3 ms, whatever they are.
MAX_BYTE_SIZE = 32 << 10

#: The same for bodies with strings, of which each becomes an object and a part of the tensor.
_MAX_STRINGS_BYTE_SIZE = 16 << 10

#: How many beginnings of bodies are kept, and how many skeletons that begin alike.
_MAX_BEGINNINGS = 1024

_MAX_ALIKE = 4

#: Bodies are prepared until there are this many. Of later ones that are not recognised only one in a few is: there are
#: clients whose text differs each time, in a sequence id for example.
_PREPARED_AT_ONCE = 64

_PREPARED_OF = 16

#: Stands for every id in front, between its quotes.
_LEADING_ID = b"\\u0000id"


class _InputText(msgspec.Struct):
    name: str
    data: msgspec.Raw = msgspec.Raw()


class _BodyText(msgspec.Struct):
    """A body, of which the parser reads the same members."""

    inputs: list[_InputText]
    id: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_BodyText)


class PreparedJsonBody(msgspec.Struct, frozen=True):
    """What bodies have in common whose JSON is the same except for the id and the data."""

    common: PreparedRequest
    outputs: OutputFormat
    template: ResponseTemplate | JsonResponseTemplate | None
    skeleton: JsonSkeleton
    #: The names, datatypes and shapes of the inputs with data, in the order of the skeleton's values. Other inputs are
    #: in regions of the client.
    names: list[str]
    datatypes: list[str]
    shapes: list[list[int]]
    in_regions: bool
    #: Which of the skeleton's values is the id; -1 for none.
    id_place: int
    #: The most bytes that a tensor may have, where some are BYTES, which have any length; else 0.
    max_byte_size: int

    def read(self, text: bytes, begin: int, id: str, sink: Sink) -> Request | None:
        """Return the request in `text`, which is looked at from `begin` on; None if it is another one, or is wrong.

        `id` is the one that stands before `begin`, if any.
        """
        if self.max_byte_size and len(text) > _MAX_STRINGS_BYTE_SIZE:
            return None
        values = self.skeleton.read(text, begin)
        if values is None:
            return None
        common = self.common
        if self.id_place >= 0:
            id = values.pop(self.id_place)
        inputs = list(map(Tensor, self.names, self.datatypes, self.shapes, values))
        if self.in_regions:
            inputs = self._with_regions(inputs)
        request = common.with_inputs(inputs, id or common.request.id, sink)
        if self.max_byte_size:
            sizes = [len(data) for data in values]
            if max(sizes) > self.max_byte_size:
                return None
            request.byte_size = REQUEST_BYTE_SIZE + sum(sizes) if common.small else 0
        return request

    def _with_regions(self, given: list[Tensor]) -> list[Tensor]:
        """Return all inputs in their order: those `given`, and those in regions of the client."""
        following = iter(given)
        return [
            next(following)
            if each.client_span is None
            else Tensor(each.name, each.datatype, each.shape, None, None, each.client_span)
            for each in self.common.request.inputs
        ]


class PreparedJsonBodies:
    """The prepared bodies of one HTTP server whose data is in JSON, by their text up to the first data."""

    def __init__(self, max_input_size: int) -> None:
        """`max_input_size` is how many bytes an input in JSON may have."""
        self._max_input_size = max_input_size
        self._cache: PreparedCache[tuple[str, bytes], tuple[PreparedJsonBody, ...]] = PreparedCache(_MAX_BEGINNINGS)
        #: How many bodies were not recognised.
        self._unknown = 0

    def start_generation(self, generation: int) -> None:
        """Drop what was prepared for another generation of the catalog."""
        self._cache.start_generation(generation)
        self._unknown = 0

    def match(
        self, key: str, text: bytes, begin: int, first_data: int, id: str, sink: Sink
    ) -> tuple[Request, PreparedJsonBody] | None:
        """Return the request in `text` and what it was made from, or None if it has to be parsed.

        `key` is `InferRequestHead.prepared_key`. The text is looked up from `begin` on: there `id` ends, if it stands
        in front. `DATA` stands first at `first_data`.
        """
        for prepared in self._cache.entries.get((key, text[begin:first_data]), ()):
            request = prepared.read(text, first_data, id, sink)
            if request is not None:
                return request, prepared
        return None

    def add(
        self,
        key: str,
        text: bytes,
        leading_id: re.Match[bytes] | None,
        common: PreparedRequest,
        checked: Request,
        outputs: OutputFormat,
        template: ResponseTemplate | JsonResponseTemplate | None,
    ) -> None:
        """Keep `common`, which was prepared from the request `checked` in `text`, if it can be recognised.

        `leading_id` is the id in front, as `match` has it. A request of which a part is binary data must not be given.
        """
        self._unknown += 1
        if self._unknown > _PREPARED_AT_ONCE and self._unknown % _PREPARED_OF:
            return
        begin = 0
        if leading_id is not None:  # another id will stand there, of another length: it must be the one that counts
            front = text[: leading_id.start(1)] + _LEADING_ID
            text, begin = front + text[leading_id.end(1) :], len(front)
        first_data = text.find(DATA, begin)
        holes = _holes(text, first_data, leading_id is None, checked)
        if first_data < 0 or holes is None:
            return
        id_place = next((place for place, hole in enumerate(holes) if hole.reader is STRING), -1)
        # Without an id in front or a place for one, the id is part of what is looked up.
        common.request.id = checked.id if leading_id is None and id_place < 0 else ""
        skeleton = make_skeleton(
            text,
            first_data,
            holes,
            lambda marked, marks: _is_cut_right(marked, marks, id_place, leading_id is not None),
        )
        if skeleton is None:
            return
        tensors = [each for each in common.request.inputs if each.client_span is None]
        strings = any(each.datatype == "BYTES" for each in tensors)
        limit = min(self._max_input_size, INLINE_LIMIT) if common.small else self._max_input_size
        prepared = PreparedJsonBody(
            common,
            outputs,
            template,
            skeleton,
            [each.name for each in tensors],
            [each.datatype for each in tensors],
            [each.shape for each in tensors],
            len(tensors) < len(common.request.inputs),
            id_place,
            limit if strings else 0,
        )
        place = key, text[begin:first_data]
        alike = self._cache.entries.get(place, ())
        self._cache.add(place, (prepared, *alike[: _MAX_ALIKE - 1]))


def _holes(text: bytes, first_data: int, find_id: bool, request: Request) -> list[Hole] | None:
    """Return where the data of `request` and its id seem to stand in `text`, in order; None if that is not clear."""
    try:
        document = _decoder.decode(text)
    except UNDECODABLE:
        return None
    if len(document.inputs) != len(request.inputs):
        return None
    holes: list[Hole] = []
    position = first_data
    for tensor, given in zip(request.inputs, document.inputs, strict=True):
        if tensor.name != given.name:
            return None
        if tensor.region_of_client is not None:
            continue
        value = bytes(given.data)
        count = element_count(tensor.shape) if tensor.shape else 0  # as in `check_shape`
        reader = tensor_reader(tensor.datatype, count, value) if count else None
        start = find_value(text, DATA, value, position)
        if reader is None or start < 0:
            return None
        position = start + len(value)
        holes.append(Hole(start, position, reader))
    id = bytes(document.id)
    if find_id and id and (start := find_value(text, b'"id"', id, first_data)) >= 0:
        holes.append(Hole(start, start + len(id), STRING))
        holes.sort(key=lambda hole: hole.start)
    return holes


def _is_cut_right(marked: bytes, marks: list[bytes], id_place: int, has_leading_id: bool) -> bool:
    """Whether `marks` are the id and all data in the body `marked`."""
    try:
        document = _decoder.decode(marked)
    except UNDECODABLE:
        return False
    marks = list(marks)
    if has_leading_id and bytes(document.id) != b'"%b"' % _LEADING_ID:
        return False
    if id_place >= 0 and bytes(document.id) != marks.pop(id_place):
        return False
    return [bytes(each.data) for each in document.inputs if each.data] == marks
