"""Prepared requests for bodies of /generate whose text is the same except for the inputs and the id. Pure.

Clients repeat the parameters of a prompt. What is read from the body, checked and translated then is only the prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.serving.prepared import PreparedCache, PreparedRequest, prepare
from kernel.serving.request import REQUEST_BYTE_SIZE
from protocols.http.inference.generate_codec import NESTED
from protocols.http.json.document import UNDECODABLE, member_texts
from protocols.http.json.skeleton import (
    STRING,
    Hole,
    JsonSkeleton,
    ValueReader,
    find_value,
    flat_reader,
    make_skeleton,
    scalar_reader,
)
from shm.arena import INLINE_LIMIT
from shm.datatypes import element_count
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.serving.request import Request
    from kernel.serving.route import ModelRoute

#: How many models have prepared bodies, and how many each has.
_MAX_MODELS = 256
_MAX_BODIES = 8

#: Longer bodies are left to the parser.
MAX_BYTE_SIZE = 16 << 10

#: Bodies of a model are prepared until there were this many that were not recognised. Of later ones only one in a few
#: is: there are clients whose parameters differ each time.
_PREPARED_AT_ONCE = 32
_PREPARED_OF = 16

_ID = "id"


class PreparedGenerateBody(msgspec.Struct, frozen=True):
    """What bodies have in common that are the same except for the inputs and the id."""

    common: PreparedRequest
    skeleton: JsonSkeleton
    #: Which of the skeleton's values is the id; -1 for none.
    id_place: int
    #: The most bytes that an input may have.
    max_byte_size: int

    def fill(self, request: Request, text: bytes) -> bool:
        """Fill `request` from `text`; returns False, and leaves it as it was, if it is another body, or a wrong one."""
        values = self.skeleton.read(text, 0)
        if values is None:
            return False
        prepared = self.common.request
        parameters = dict(prepared.parameters)
        id = prepared.id
        if self.id_place >= 0:
            id = parameters[_ID] = values.pop(self.id_place)
        byte_size = REQUEST_BYTE_SIZE
        for data in values:
            byte_size += len(data)
            if len(data) > self.max_byte_size:
                return False
        request.id, request.parameters = id, parameters
        request.inputs = [
            Tensor(tensor.name, tensor.datatype, tensor.shape, data)
            for tensor, data in zip(prepared.inputs, values, strict=True)
        ]
        request.batch_size = prepared.batch_size
        request.byte_size = byte_size
        return True


class _Bodies(msgspec.Struct):
    """The prepared bodies of one model, the newest first."""

    prepared: list[PreparedGenerateBody] = []
    #: How many bodies were not recognised.
    unknown: int = 0


class PreparedGenerateBodies:
    """The prepared bodies of one HTTP server."""

    def __init__(self, max_input_size: int) -> None:
        """`max_input_size` is how many bytes an input may have."""
        self._max_input_size = max_input_size
        self._cache: PreparedCache[tuple[str, str], _Bodies] = PreparedCache(_MAX_MODELS)

    def fill(self, request: Request, text: bytes, generation: int) -> PreparedGenerateBody | None:
        """Fill `request` from `text` and return what it was filled by; None if the text has to be parsed.

        `generation` is the catalog's. The request names its model and has nothing else.
        """
        cache = self._cache
        if generation != cache.generation:
            cache.start_generation(generation)
            return None
        bodies = cache.entries.get((request.model_name, request.model_version))
        if bodies is not None:
            for body in bodies.prepared:
                if body.fill(request, text):
                    return body
        return None

    def add(self, text: bytes, request: Request, route: ModelRoute) -> None:
        """Keep a request that was parsed from `text` and fits `route`, if others like it can be recognised.

        The catalog is as `fill` has last seen it.
        """
        key = request.model_name, request.model_version
        bodies = self._cache.entries.get(key)
        if bodies is None:
            bodies = _Bodies()
            self._cache.add(key, bodies)
        bodies.unknown += 1
        if len(text) > MAX_BYTE_SIZE or (bodies.unknown > _PREPARED_AT_ONCE and bodies.unknown % _PREPARED_OF):
            return
        holes = _holes(text, request)
        if holes is None:
            return
        names = [name for name, _ in holes]
        skeleton = make_skeleton(
            text, 0, [hole for _, hole in holes], lambda marked, marks: _is_cut_right(marked, marks, names)
        )
        if skeleton is None:
            return
        common = prepare(request, route)
        places = [name for name in names if name != _ID]
        common.request.inputs.sort(key=lambda tensor: places.index(tensor.name))
        limit = min(self._max_input_size, INLINE_LIMIT) if common.small else self._max_input_size
        prepared = PreparedGenerateBody(common, skeleton, names.index(_ID) if _ID in names else -1, limit)
        bodies.prepared = [prepared, *bodies.prepared[: _MAX_BODIES - 1]]


def _holes(text: bytes, request: Request) -> list[tuple[str, Hole]] | None:
    """Return where the inputs of `request` and its id seem to stand in `text`, in order, each with the member's name.

    None if that is not clear, or an input is within `parameters`.
    """
    try:
        members = member_texts(text)
    except UNDECODABLE:
        return None
    holes: list[tuple[str, Hole]] = []
    for tensor in request.inputs:
        value = bytes(members.get(tensor.name, b""))
        count = element_count(tensor.shape)
        is_array = value.startswith(b"[")
        reader = flat_reader(tensor.datatype, count) if is_array else scalar_reader(tensor.datatype)
        if tensor.name == _ID or not count or reader is None or not _add(holes, text, tensor.name, value, reader):
            return None
    if _ID in members and (
        _ID in _nested(members)  # which of the two the model gets depends on their order
        or not _add(holes, text, _ID, bytes(members[_ID]), STRING)
    ):
        return None
    holes.sort(key=lambda hole: hole[1].start)
    return holes


def _nested(members: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return the members within `parameters`."""
    nested = members.get(NESTED)
    return {} if nested is None else member_texts(nested)


def _add(holes: list[tuple[str, Hole]], text: bytes, name: str, value: bytes, reader: ValueReader) -> bool:
    """Add the place of member `name`, which has `value`; returns False if it is not found."""
    start = find_value(text, msgspec.json.encode(name), value)
    if start >= 0:
        holes.append((name, Hole(start, start + len(value), reader)))
    return start >= 0


def _is_cut_right(marked: bytes, marks: list[bytes], names: list[str]) -> bool:
    """Whether `marks` are the members `names` of the body `marked`."""
    try:
        members = member_texts(marked)
    except UNDECODABLE:
        return False
    return [bytes(members.get(name, b"")) for name in names] == marks
