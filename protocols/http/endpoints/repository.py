"""The model repository over HTTP: index, load, unload."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, InvalidArgument, Unsupported
from protocols.http.body import read_control_text, read_json_text
from protocols.http.json.document import ABSENT, as_bool, as_members, as_string, member, parse
from protocols.http.responses import empty_response, json_response

if TYPE_CHECKING:
    from aiohttp import web

    from protocols.http.call import HttpCall


async def index(call: HttpCall) -> web.Response:
    """List models; a repository in the path is ignored (Triton)."""
    ready = member(_parse_optional(await read_control_text(call)), "ready")
    if ready is ABSENT:
        ready = False
    if not isinstance(ready, bool):
        raise InvalidArgument("Invalid value for 'ready': expected a boolean")
    return json_response(
        [
            {field: text for field, text in msgspec.structs.asdict(item).items() if text}
            for item in await call.kernel.repository.index(ready)
        ]
    )


async def load(call: HttpCall) -> web.Response:
    """Load a model; responds when it is ready."""
    _check_repository(call)
    parameters = member(_parse_optional(await read_json_text(call)), "parameters")
    decoded: dict[str, Any] = {}
    if parameters is not ABSENT:
        decoded = {key: _load_parameter(key, value) for key, value in as_members(parameters).items()}
    await call.kernel.repository.load(call.names["model"], decoded or None)
    return empty_response()


async def unload(call: HttpCall) -> web.Response:
    """Unload a model; other parameters than `unload_dependents` are ignored (Triton)."""
    _check_repository(call)
    document = _parse_optional(await read_control_text(call))
    unload_dependents = member(member(document, "parameters"), "unload_dependents")
    if unload_dependents is not ABSENT:
        try:
            as_bool(unload_dependents)
        except InternalError as error:
            raise InternalError(f"Unable to parse 'unload_dependents': {error.message}") from None
    await call.kernel.repository.unload(call.names["model"], unload_dependents is True)
    return empty_response()


def _parse_optional(text: bytes) -> Any:
    return parse(text) if text else {}


def _check_repository(call: HttpCall) -> None:
    if call.names["repository"]:
        raise Unsupported("'repository_name' specification is not supported")


def _load_parameter(key: str, value: Any) -> str | bytes:
    text = as_string(value)
    if key == "config":
        return text
    if not key.startswith("file:"):
        raise InternalError("unexpected error on creating Triton parameter")
    try:
        return binascii.a2b_base64(text.encode())
    except binascii.Error as error:
        raise InvalidArgument(f"load parameter '{key}' is not base64: {error}") from None
