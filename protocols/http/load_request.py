"""Bodies of load requests: a configuration, and files in base64. Large ones are decoded in a helper. Pure."""

from __future__ import annotations

import binascii
import re
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InternalError, InvalidArgument
from kernel.serving.helper_tasks import TaskResult
from protocols.http.json.document import (
    ABSENT,
    LARGE_BYTE_SIZE,
    SPECIAL_MARK,
    UNDECODABLE,
    TooDeep,
    as_members,
    as_string,
    made_valid,
    member,
    member_texts,
    parse,
)
from protocols.http.json.large import count_parts
from protocols.http.json.syntax import JsonSyntaxError
from protocols.large_requests import joined
from protocols.request_limits import MAX_PARTS, check_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps
    from shm.tensor import Buffer

#: The name of the function.
DECODE_LOAD = "http.decode_load"

#: The longest configuration that is passed on. Its own limit is smaller.
_MAX_CONFIG_LENGTH = 1 << 20


class DecodedLoad(msgspec.Struct, array_like=True):
    """What a helper finds out about a load request. The files follow in memory of the kernel process."""

    config: str | None
    #: Key and byte size of each file, in the order in which they follow.
    files: list[tuple[str, int]]

    @property
    def byte_size(self) -> int:
        return sum(size for _, size in self.files)


#: Returns what `decode_load_task` has found out.
read_load = msgspec.msgpack.Decoder(DecodedLoad).decode


class _LoadBody(msgspec.Struct):
    """The members of a load request that are read. Others are skipped, without creating objects for them."""

    parameters: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_text_decoder = msgspec.json.Decoder(msgspec.Raw)
_body_decoder = msgspec.json.Decoder(_LoadBody)
_string_decoder = msgspec.json.Decoder(str)

#: Where msgspec stopped, in the text of its error.
_STOPPED_AT = re.compile(r"\(byte (\d+)\)")


def decode_load(text: Buffer) -> dict[str, str | bytes]:
    """Return the parameters of a load request. Raises `ServingError`."""
    if len(text) > LARGE_BYTE_SIZE:
        texts = _parameters_of(_valid(text))
        return {key: _parameter(key, _string(value)) for key, value in texts.items()}
    parameters = member(parse(bytes(text)) if len(text) else {}, "parameters")
    if parameters is ABSENT:
        return {}
    members = as_members(parameters)
    check_count("parameters", len(members))
    return {key: _parameter(key, as_string(value)) for key, value in members.items()}


def _valid(text: Buffer) -> Buffer:
    """Return a large `text` as JSON that msgspec accepts. Raises `JsonSyntaxError` or `TooDeep`."""
    try:
        _text_decoder.decode(text)
    except RecursionError:
        raise TooDeep from None
    except UNDECODABLE:
        text = made_valid(bytes(text))
    else:
        return text
    try:
        _text_decoder.decode(text)
    except RecursionError:
        raise TooDeep from None
    except UNDECODABLE as error:
        found = _STOPPED_AT.search(str(error))
        raise JsonSyntaxError("Invalid value.", int(found[1]) if found else 0) from None
    return text


def _parameters_of(text: Buffer) -> dict[str, msgspec.Raw]:
    """Return the parameters in a large valid `text`, each as its text. Raises `ServingError`."""
    try:
        parameters = _body_decoder.decode(text).parameters
    except msgspec.ValidationError:
        return {}  # a body that is no object has no parameters, as in Triton
    if isinstance(parameters, msgspec.UnsetType):
        return {}
    view = memoryview(parameters)
    if view[0] != ord("{"):
        as_members(None)  # raises
    check_count("parameters", count_parts(view, MAX_PARTS))
    return member_texts(parameters)


def _string(text: msgspec.Raw) -> str:
    """Return a parameter's text as a string. Raises `InternalError` for what is none."""
    try:
        found = _string_decoder.decode(text)
    except msgspec.ValidationError:
        return as_string(None)
    except UNDECODABLE:
        raise JsonSyntaxError("Invalid encoding in string.", 0) from None
    return as_string(None if found.startswith(SPECIAL_MARK) else found)


def _parameter(key: str, text: str) -> str | bytes:
    if key == "config":
        if len(text) > _MAX_CONFIG_LENGTH:
            raise InvalidArgument(
                f"load parameter 'config' has {len(text)} characters, at most {_MAX_CONFIG_LENGTH} are allowed"
            )
        return text
    if not key.startswith("file:"):
        raise InternalError("unexpected error on creating Triton parameter")
    try:
        return binascii.a2b_base64(text.encode())
    except binascii.Error as error:
        raise InvalidArgument(f"load parameter '{key}' is not base64: {error}") from None


def decode_load_task(arguments: bytes, sources: Sequence[memoryview], /) -> TaskSteps:
    """Decode a large load request."""
    parameters = decode_load(joined(sources))
    files = {key: value for key, value in parameters.items() if isinstance(value, bytes)}
    config = parameters.get("config")
    described = DecodedLoad(
        config if isinstance(config, str) else None, [(key, len(value)) for key, value in files.items()]
    )
    message = msgspec.msgpack.encode(described)
    memory = yield message
    position = 0
    for content in files.values():
        memory[position : position + len(content)] = content
        position += len(content)
    return TaskResult(message)


def load_parameters(message: bytes, memory: memoryview) -> dict[str, str | memoryview]:
    """Return the parameters of a load request whose files are in `memory`."""
    decoded = read_load(message)
    parameters: dict[str, str | memoryview] = {} if decoded.config is None else {"config": decoded.config}
    position = 0
    for key, byte_size in decoded.files:
        parameters[key] = memory[position : position + byte_size]
        position += byte_size
    return parameters
