"""The paths of the OpenAI front door. Model names may contain slashes (`org/model`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import msgspec

from protocols.access.restricted import Category
from protocols.http import web
from protocols.openai import embedding, endpoints, generating
from protocols.openai.calls import OpenAiCall

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
    "/v1/chat/completions": OpenAiRoute(Category.INFERENCE, {"POST": generating.chat_completions}),
    "/v1/completions": OpenAiRoute(Category.INFERENCE, {"POST": generating.completions}),
    "/v1/embeddings": OpenAiRoute(Category.INFERENCE, {"POST": embedding.embeddings}),
    "/v1/models": OpenAiRoute(Category.METADATA, {"GET": endpoints.list_models}),
    "/health/ready": OpenAiRoute(Category.HEALTH, {"GET": endpoints.ready}),
}

_MODEL = "/v1/models/"
_MODEL_ROUTE = OpenAiRoute(Category.METADATA, {"GET": endpoints.get_model})
_ACTIONS = {
    "load": OpenAiRoute(Category.MODEL_REPOSITORY, {"POST": endpoints.load}, administers=True),
    "unload": OpenAiRoute(Category.MODEL_REPOSITORY, {"POST": endpoints.unload}, administers=True),
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
