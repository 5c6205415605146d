"""The paths of the OpenAI front door, and the handlers that list, load and unload models or say whether it is ready.

Model names may contain slashes (`org/model`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import unquote

import msgspec

from kernel.errors import ErrorCode, ServingError
from protocols.access import Category
from protocols.http import web
from protocols.http.responses import json_text_response
from protocols.openai import inference, tokenizing
from protocols.openai.call import OpenAiCall
from protocols.openai.dialects import dialect_of, embedding_dialect
from protocols.openai.errors import ApiError, unknown_model

_encode = msgspec.json.Encoder().encode

#: The owner of all models. Triton's tests and clients compare it, so it is Triton's text, as the default name of the
#: server in `GET /v2` is.
_OWNER = "Triton Inference Server"


async def list_models(call: OpenAiCall) -> web.Response:
    """List the models that this front door serves."""
    kernel = call.door.kernel
    names = sorted(name for name in kernel.catalog.ready_names() if call.admits(name) and _is_served(call, name))
    return json_text_response(_encode({"object": "list", "data": [_model(call, name) for name in names]}))


async def get_model(call: OpenAiCall) -> web.Response:
    """Describe one model."""
    name = call.names["model"]
    call.check_model(name)
    if name not in call.door.kernel.catalog.ready_names() or not _is_served(call, name):
        raise unknown_model(name, 404)
    return json_text_response(_encode(_model(call, name)))


async def load(call: OpenAiCall) -> web.Response:
    """Load a model; responds when it is ready."""
    name, kernel = await _administered(call), call.door.kernel
    if name in kernel.catalog.ready_names():
        raise ApiError(f"Model '{name}' is already loaded", param="model")
    if name in call.door.loading:  # of several clients one loads it (Triton)
        raise ApiError(f"Model '{name}' is already being loaded", param="model")
    call.door.loading.add(name)
    try:
        await kernel.repository.load(name)
    except ServingError as error:
        status = 500 if error.code in (ErrorCode.NOT_FOUND, ErrorCode.INTERNAL) else 400
        raise ApiError(f"Failed to load model '{name}': {error.text}", status, param="model") from None
    finally:
        call.door.loading.discard(name)
    return json_text_response(_encode(_model(call, name)))


async def unload(call: OpenAiCall) -> web.Response:
    """Unload a model; responds at once, while its last requests end."""
    name, kernel = await _administered(call), call.door.kernel
    if name not in kernel.catalog.ready_names():
        raise unknown_model(name)
    await kernel.repository.unload(name)
    return json_text_response(_encode({"status": "success", "model": name}))


async def _administered(call: OpenAiCall) -> str:
    """Return the model that a client loads or unloads. Raises `ApiError`, also for a body that is too large."""
    await call.read_body(_ignore)
    if not call.door.kernel.settings.explicit_control:
        raise ApiError("Model load/unload requires --model-control-mode=explicit")
    call.check_model(call.names["model"])
    return call.names["model"]


def _ignore(part: bytes) -> None:
    """Nothing in a body changes how a model is loaded here."""


async def ready(call: OpenAiCall) -> web.Response:
    """Respond whether the server is ready for requests."""
    try:
        is_ready = await call.door.kernel.server_is_ready()
    except ServingError:
        is_ready = False
    if not is_ready:
        raise ApiError("Attached inference engine is not ready for inference requests.")
    return json_text_response(b"")


def _is_served(call: OpenAiCall, name: str) -> bool:
    try:
        spec = call.door.kernel.route(name).spec
    except ServingError:  # unloaded meanwhile
        return False
    return dialect_of(spec) is not None or embedding_dialect(spec) is not None


def _model(call: OpenAiCall, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": call.door.created_s(name), "owned_by": _OWNER}


_Handler = Callable[[OpenAiCall], Awaitable[web.StreamResponse]]


class OpenAiRoute(msgspec.Struct, frozen=True):
    """What the requests to one path are."""

    #: With `--http-restricted-api`, requests of this category may need a header.
    category: Category
    #: Method → handler.
    handlers: dict[str, _Handler]
    #: Whether it changes the server (`--admin-access`).
    administers: bool = False


_LITERAL = {
    "/v1/chat/completions": OpenAiRoute(Category.INFERENCE, {"POST": inference.chat_completions}),
    "/v1/completions": OpenAiRoute(Category.INFERENCE, {"POST": inference.completions}),
    "/v1/responses": OpenAiRoute(Category.INFERENCE, {"POST": inference.responses}),
    "/v1/embeddings": OpenAiRoute(Category.INFERENCE, {"POST": inference.embeddings}),
    "/tokenize": OpenAiRoute(Category.INFERENCE, {"POST": tokenizing.tokenize}),
    "/detokenize": OpenAiRoute(Category.INFERENCE, {"POST": tokenizing.detokenize}),
    "/v1/models": OpenAiRoute(Category.METADATA, {"GET": list_models}),
    "/health/ready": OpenAiRoute(Category.HEALTH, {"GET": ready}),
}

_MODEL = "/v1/models/"

_MODEL_ROUTE = OpenAiRoute(Category.METADATA, {"GET": get_model})

_ACTIONS = {
    "load": OpenAiRoute(Category.MODEL_REPOSITORY, {"POST": load}, administers=True),
    "unload": OpenAiRoute(Category.MODEL_REPOSITORY, {"POST": unload}, administers=True),
}

#: Every path, for documents and tests.
PATHS = (*_LITERAL, f"{_MODEL}NAME", *(f"{_MODEL}NAME/{action}" for action in _ACTIONS))


def find_route(path: str) -> tuple[OpenAiRoute, dict[str, str]] | None:
    """Return the route of a path, and the names in it. Names are decoded once."""
    found = _LITERAL.get(path)
    if found is not None:
        return found, {}
    if not path.startswith(_MODEL):
        return None
    rest = path.removeprefix(_MODEL)
    name, _, action = rest.rpartition("/")
    if action in _ACTIONS:
        # No model of a repository has a slash in its name; an empty name is none either (Triton).
        return (_ACTIONS[action], {"model": unquote(name)}) if name and "/" not in name else None
    return (_MODEL_ROUTE, {"model": unquote(rest)}) if rest else None
