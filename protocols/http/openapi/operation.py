"""One method of one path in the OpenAPI document: what it takes, and every response that it can give. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from protocols.access.restricted import Category, Restrictions

#: A part of the document.
Part = dict[str, Any]

JSON = "application/json"
PLAIN = "text/plain"
EVENTS = "text/event-stream"

_ERRORS = {
    400: "The request is wrong, or was cancelled.",
    404: "There is no such thing.",
    408: "The body did not come in time; the connection is closed.",
    429: "The client has as many requests queued or in flight as it may have (naiad.quota).",
    500: "The model failed, or the request is not JSON of the expected form (as in Triton).",
    501: "This is not supported.",
    503: "Not now: the model is not ready, its queue is full, or the server is stopping.",
}
_FORBIDDEN = (
    "The header of a restriction is not there or has another value, or a web page sends the request that may not call "
    "the server."
)

#: The security scheme of --admin-access=key.
ADMIN = "admin"

_ERROR_CONTENT: dict[str, Part] = {
    JSON: {"schema": {"$ref": "#/components/schemas/Error"}},
    # Triton calls errors of some phases plain text, although they are the same JSON.
    PLAIN: {
        "schema": {
            "type": "string",
            "contentMediaType": JSON,
            "contentSchema": {"$ref": "#/components/schemas/Error"},
        }
    },
    # OpenAPI 3.1 has no words for events.
    EVENTS: {},
}


class Operation(msgspec.Struct, frozen=True):
    """A method with its responses. `errors` are the statuses of errors, each with all of `error_types`."""

    #: Unique in the document.
    id: str
    summary: str
    category: Category
    #: The response with status 200.
    success: Part
    method: str = "get"
    errors: tuple[int, ...] = ()
    error_types: tuple[str, ...] = (JSON,)
    #: The content of the body by media type; None if none is read.
    body: Part | None = None
    body_required: bool = True
    parameters: tuple[Part, ...] = ()
    #: As that of `protocols.http.routes.Endpoint`.
    administers: bool = False

    def render(self, restrictions: Restrictions) -> Part:
        """Return the operation object."""
        responses = {"200": self.success}
        for status in self.errors:
            responses[str(status)] = _error(_ERRORS[status], self.error_types)
        if self.body is not None:
            responses["408"] = _error(_ERRORS[408], (PLAIN,))
        rendered: Part = {
            "operationId": self.id,
            "summary": self.summary,
            "tags": [self.category.value],
            "responses": responses,
        }
        if self.parameters:
            rendered["parameters"] = list(self.parameters)
        if self.body is not None:
            rendered["requestBody"] = {"content": self.body, "required": self.body_required}
        responses["403"] = _error(_FORBIDDEN, (PLAIN,))
        schemes = []
        if restrictions.of(self.category) is not None:
            schemes.append(self.category.value)
        if self.administers and restrictions.admin.key is not None:
            schemes.append(ADMIN)
        if schemes:
            rendered["security"] = [{scheme: [] for scheme in schemes}]  # all of them are needed
        return rendered


def response(description: str, **content: Part) -> Part:
    """Return a response; `content` has a media type object for each of its types, `json` for JSON's."""
    if not content:
        return {"description": description}
    return {"description": description, "content": {_TYPES[name]: part for name, part in content.items()}}


_TYPES = {
    "json": JSON,
    "plain": PLAIN,
    "binary": "application/octet-stream",
    "events": EVENTS,
}


def json_response(description: str, schema: Part) -> Part:
    """Return a response in JSON."""
    return response(description, json={"schema": schema})


def json_body(schema: Part) -> Part:
    """Return the content of a body in JSON."""
    return {JSON: {"schema": schema}}


def ref(name: str) -> Part:
    """Return a reference to a schema of `schemas.SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{name}"}


def _error(description: str, media_types: tuple[str, ...]) -> Part:
    return {
        "description": description,
        "content": {media_type: _ERROR_CONTENT[media_type] for media_type in media_types},
    }
