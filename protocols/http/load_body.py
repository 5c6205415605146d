"""Bodies of load requests: a configuration, and files in base64. Large ones are decoded in a helper. Pure."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, InvalidArgument
from kernel.serving.helper_tasks import TaskResult
from protocols.helpers.request_task import joined
from protocols.http.json.document import ABSENT, as_members, as_string, member, parse
from protocols.request_limits import check_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.helper_tasks import TaskSteps

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


_decoder = msgspec.msgpack.Decoder(DecodedLoad)


def decode_load(text: bytes) -> dict[str, str | bytes]:
    """Return the parameters of a load request. Raises `ServingError`."""
    parameters = member(parse(text) if text else {}, "parameters")
    if parameters is ABSENT:
        return {}
    members = as_members(parameters)
    check_count("parameters", len(members))
    return {key: _parameter(key, value) for key, value in members.items()}


def _parameter(key: str, value: Any) -> str | bytes:
    text = as_string(value)
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
    parameters = decode_load(bytes(joined(sources)))
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


def read_load(message: bytes) -> DecodedLoad:
    """Return what `decode_load_task` has found out."""
    return _decoder.decode(message)


def load_parameters(message: bytes, memory: memoryview) -> dict[str, str | memoryview]:
    """Return the parameters of a load request whose files are in `memory`."""
    decoded = read_load(message)
    parameters: dict[str, str | memoryview] = {} if decoded.config is None else {"config": decoded.config}
    position = 0
    for key, byte_size in decoded.files:
        parameters[key] = memory[position : position + byte_size]
        position += byte_size
    return parameters
