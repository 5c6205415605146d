"""The model repository over HTTP: index, load, unload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError, InvalidArgument, Unsupported
from kernel.texts import SERVER_PATHS
from protocols.http.bodies import BodyCollector, read_body_into, read_control_text
from protocols.http.json.document import ABSENT, as_bool, member, parse
from protocols.http.load_request import DECODE_LOAD, decode_load, load_parameters, read_load
from protocols.http.responses import empty_response, json_response
from protocols.large_requests import LOOP_BYTE_SIZE, AwaitedTask

if TYPE_CHECKING:
    from kernel.serving.catalog import IndexItem
    from protocols.http import web
    from protocols.http.call import HttpCall


async def index(call: HttpCall) -> web.Response:
    """List models; a repository in the path is ignored (Triton)."""
    ready = member(_parse_optional(await read_control_text(call)), "ready")
    if ready is ABSENT:
        ready = False
    if not isinstance(ready, bool):
        raise InvalidArgument("Invalid value for 'ready': expected a boolean")
    return json_response([_shown(item) for item in await call.kernel.repository.index(ready)])


def _shown(item: IndexItem) -> dict[str, str]:
    members = {"name": item.name, "version": item.version, "state": item.state}
    members["reason"] = SERVER_PATHS.hidden_in(item.reason)
    return {name: text for name, text in members.items() if text}


async def load(call: HttpCall) -> web.Response:
    """Load a model; responds when it is ready."""
    _check_repository(call)
    kernel = call.kernel
    with BodyCollector(kernel.memory_for_helper, call.http.content_length) as collector:
        await read_body_into(call.http, call.max_input_size, call.json_too_large, collector.add)
        if collector.byte_size <= LOOP_BYTE_SIZE:
            await kernel.repository.load(call.names["model"], decode_load(collector.body()) or None)
            return empty_response()
        task = AwaitedTask(
            kernel,
            DECODE_LOAD,
            b"",
            collector.sources(),
            lambda message: kernel.memory_for_helper(max(1, read_load(message).byte_size)),
            call.peer,
        )
        message, _ = await task.run()
        assert task.memory is not None, "files without memory"
        try:
            parameters = load_parameters(message, task.memory.view())
            await kernel.repository.load(call.names["model"], parameters or None)
        finally:
            task.memory.release()
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
