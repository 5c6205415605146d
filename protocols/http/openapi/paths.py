"""The paths of the OpenAPI document that do not depend on the loaded models, and what an `Operation` is. Pure.

An operation is one method of one path: what it takes, and every response that it can give. Every route of
`protocols.http.routes` has its entry here; a test compares the two.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from protocols.access import Category

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocols.access import Restrictions

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
    #: As in `protocols.http.routes.Endpoint`.
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


#: Bytes of JSON, behind which tensors lie.
BINARY = "application/octet-stream"

_EMPTY = response("Done.")

_BODY_ERRORS = (400, 500, 503)

_MODEL: Part = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}

_VERSION: Part = {
    "name": "version",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
}

_REGION: Part = {"name": "region", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}

_REPOSITORY: Part = {"name": "repository", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}

_HEADER_LENGTH: Part = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "How many bytes of the body are JSON; what follows are the tensors that are sent as binary data. "
    "0 makes the whole body the only input of the model.",
    "schema": {"type": "integer", "minimum": 0},
}


_get = Operation

_post = functools.partial(Operation, method="post")


def generic_paths() -> dict[str, list[Operation]]:
    """Return the operations of each path."""
    paths: dict[str, list[Operation]] = {**_server(), **_repository(), **_shared_memory()}
    for prefix, parameters, suffix in (
        ("/v2/models/{model}", (_MODEL,), ""),
        ("/v2/models/{model}/versions/{version}", (_MODEL, _VERSION), "OfVersion"),
    ):
        # With a version that is not a number the path does not exist, which is a plain-text error in Triton.
        types = (JSON, PLAIN) if suffix else (JSON,)
        paths |= _model(prefix, parameters, suffix, types)
        paths |= _inference(prefix, parameters, suffix)
    paths["/v2/models/{model}/trace/setting"] = _trace("Model", (_MODEL,))
    paths |= _traffic()
    return paths


def _server() -> dict[str, list[Operation]]:
    health, metadata = Category.HEALTH, Category.METADATA
    statistics = json_response("Statistics of what is ready.", ref("Statistics"))
    return {
        "/v2": [
            _get(
                "serverMetadata",
                "Name, version and extensions",
                metadata,
                json_response("Metadata.", ref("ServerMetadata")),
            )
        ],
        "/v2/openapi.json": [
            _get("openapi", "This document", metadata, json_response("OpenAPI 3.1.", {"type": "object"}))
        ],
        "/v2/health/live": [
            _get(
                "serverLive",
                "Whether the server runs",
                health,
                response("It does."),
                errors=(400, 503),
                error_types=(PLAIN,),
            )
        ],
        "/v2/health/ready": [
            _get(
                "serverReady",
                "Whether the server is ready",
                health,
                response("It is."),
                errors=(400, 503),
                error_types=(PLAIN,),
            )
        ],
        "/v2/models/stats": [_get("allStatistics", "Statistics of all models", Category.STATISTICS, statistics)],
        "/v2/trace/setting": _trace("Server", ()),
        "/v2/logging": [
            _get("getLogSettings", "Log settings", Category.LOGGING, json_response("Settings.", ref("LogSettings"))),
            _post(
                "setLogSettings",
                "Change log settings",
                Category.LOGGING,
                json_response("The settings as they are now.", ref("LogSettings")),
                body=json_body(ref("LogChange")),
                errors=(400, 500, 501, 503),
                administers=True,
            ),
        ],
    }


def _trace(whose: str, parameters: tuple[Part, ...]) -> list[Operation]:
    found = json_response("The settings as they are now.", ref("TraceSettings"))
    return [
        _get(
            f"get{whose}TraceSettings",
            "Trace settings",
            Category.TRACE,
            found,
            parameters=parameters,
            errors=(400,) if parameters else (),
        ),
        _post(
            f"set{whose}TraceSettings",
            "Change trace settings",
            Category.TRACE,
            found,
            parameters=parameters,
            body=json_body(ref("TraceChange")),
            errors=(400, 500, 501),
            administers=True,
        ),
    ]


def _traffic() -> dict[str, list[Operation]]:
    category, prefix = Category.MODEL_REPOSITORY, "/v2/models/{model}/traffic"
    found = json_response("The rule, what it means now, and its history.", {"type": "object"})
    change = functools.partial(
        _post, parameters=(_MODEL,), errors=(400, 404, 500, 501, 503), administers=True
    )  # fmt: skip
    return {
        prefix: [
            _get("traffic", "Which versions get which requests", category, found, parameters=(_MODEL,), errors=(404,)),
            change(
                "changeTraffic",
                "Change which versions get which requests",
                category,
                found,
                body=json_body(ref("TrafficRule")),
            ),
        ],
        "/v2/models/{model}/feedback": [
            _post(
                "feedback",
                "Report rewards for requests by their ids",
                Category.INFERENCE,
                json_response("How many were counted, and how many ids are unknown.", {"type": "object"}),
                parameters=(_MODEL,),
                body=json_body({"oneOf": [ref("Reward"), {"type": "array", "items": ref("Reward")}]}),
                errors=(400, 404, 500, 501, 503),
            )
        ],
        f"{prefix}/shadow/worst": [
            _get(
                "worstPairs",
                "The requests whose outputs have differed most, as a recording for naiad replay",
                category,
                response("A segment of a recording.", **{BINARY: {}}),
                parameters=(_MODEL,),
                errors=(404, 501),
                administers=True,
            )
        ],
        f"{prefix}/reset": [change("resetTraffic", "Use the rule of the repository again", category, found)],
        **_rollout(change),
    }


def _rollout(change: Callable[..., Operation]) -> dict[str, list[Operation]]:
    category, prefix = Category.MODEL_REPOSITORY, "/v2/models/{model}/rollout"
    found = json_response("Where the rollout is; null if the model had none.", {"type": ["object", "null"]})
    paths = {
        prefix: [
            _get("rollout", "Where a rollout is", category, found, parameters=(_MODEL,), errors=(404,)),
            change("startRollout", "Begin a rollout", category, found, body=json_body(ref("Rollout"))),
        ]
    }
    for action in ("pause", "resume", "promote", "abort"):
        summary = f"{action.capitalize()} a rollout"
        paths[f"{prefix}/{action}"] = [change(f"{action}Rollout", summary, category, found)]
    return paths


def _model(
    prefix: str, parameters: tuple[Part, ...], suffix: str, types: tuple[str, ...]
) -> dict[str, list[Operation]]:
    lookup = functools.partial(Operation, parameters=parameters, errors=(400, 404, 503), error_types=types)
    metadata = json_response("Inputs and outputs.", ref("ModelMetadata"))
    config = json_response("The configuration.", ref("ModelConfig"))
    statistics = json_response("Statistics of its versions.", ref("Statistics"))
    return {
        prefix: [lookup(f"modelMetadata{suffix}", "Metadata of a model", Category.METADATA, metadata)],
        f"{prefix}/ready": [
            _get(
                f"modelReady{suffix}",
                "Whether a model is ready",
                Category.HEALTH,
                response("It is."),
                parameters=parameters,
                errors=(400, 404),
                error_types=(PLAIN,),
            )
        ],
        f"{prefix}/poison/clear": [
            _post(
                f"clearPoison{suffix}",
                "Accept requests again that have ended workers of the model",
                Category.MODEL_REPOSITORY,
                json_response("How many were forgotten.", {"type": "object"}),
                parameters=parameters,
                errors=(400, 404, 503),
                error_types=types,
                administers=True,
            )
        ],
        f"{prefix}/config": [lookup(f"modelConfig{suffix}", "Model configuration", Category.MODEL_CONFIG, config)],
        f"{prefix}/stats": [
            lookup(f"modelStatistics{suffix}", "Statistics of a model", Category.STATISTICS, statistics)
        ],
    }


def _inference(prefix: str, parameters: tuple[Part, ...], suffix: str) -> dict[str, list[Operation]]:
    infer_body = {JSON: {"schema": ref("InferRequest")}, BINARY: {}}
    return {
        f"{prefix}/infer": [
            infer_operation(
                f"infer{suffix}", "Inference", infer_body, ref("InferResponse"), (*parameters, _HEADER_LENGTH)
            )
        ],
        f"{prefix}/generate": [
            generate_operation(f"generate{suffix}", ref("GenerateRequest"), ref("GenerateResponse"), parameters)
        ],
        f"{prefix}/generate_stream": [
            generate_stream_operation(f"generateStream{suffix}", ref("GenerateRequest"), parameters)
        ],
    }


def infer_operation(id: str, summary: str, body: Part, found: Part, parameters: tuple[Part, ...] = ()) -> Operation:
    """Return the operation of an /infer path; `body` is its content, `found` the schema of a response in JSON."""
    return _post(
        id,
        summary,
        Category.INFERENCE,
        response("The outputs.", json={"schema": found}, binary={}),
        parameters=parameters,
        body=body,
        errors=(400, 404, 429, 500, 501, 503),
        error_types=(JSON, PLAIN),
    )


def generate_operation(id: str, body: Part, found: Part, parameters: tuple[Part, ...] = ()) -> Operation:
    """Return the operation of a /generate path."""
    return _post(
        id,
        "Inference with one flat object in and out",
        Category.INFERENCE,
        json_response(
            "The only response; an error where there is another number of them.", {"anyOf": [found, ref("Error")]}
        ),
        parameters=parameters,
        body=json_body(body),
        errors=(400, 404, 429, 500, 501, 503),
        error_types=(JSON, PLAIN) if parameters else (JSON,),
    )


def generate_stream_operation(id: str, body: Part, parameters: tuple[Part, ...] = ()) -> Operation:
    """Return the operation of a /generate_stream path: each response is an event with one JSON object."""
    return _post(
        id,
        "Inference with a stream of responses",
        Category.INFERENCE,
        response("Server-sent events, each with a response as /generate gives it.", events={}),
        parameters=parameters,
        body=json_body(body),
        errors=(400, 404, 429, 500, 501, 503),
        error_types=(JSON, PLAIN, EVENTS),
    )


def _repository() -> dict[str, list[Operation]]:
    category = Category.MODEL_REPOSITORY
    errors = (400, 404, 500, 501, 503)
    paths: dict[str, list[Operation]] = {}
    for prefix, parameters, suffix in (
        ("/v2/repository", (), ""),
        ("/v2/repository/{repository}", (_REPOSITORY,), "OfRepository"),
    ):
        controls: tuple[tuple[str, str, str], ...] = (
            ("load", "Load a model, or load it again", "LoadRequest"),
            ("unload", "Unload a model", "UnloadRequest"),
        )
        paths[f"{prefix}/index"] = [
            _post(
                f"repositoryIndex{suffix}",
                "Models and their states",
                category,
                json_response("The index.", ref("Index")),
                parameters=parameters,
                body=json_body(ref("IndexRequest")),
                body_required=False,
                errors=_BODY_ERRORS,
            )
        ]
        for verb, summary, schema in controls:
            paths[f"{prefix}/models/{{model}}/{verb}"] = [
                _post(
                    f"{verb}Model{suffix}",
                    summary,
                    category,
                    _EMPTY,
                    parameters=(*parameters, _MODEL),
                    body=json_body(ref(schema)),
                    body_required=False,
                    errors=errors,
                    administers=True,
                )
            ]
    return paths


def _shared_memory() -> dict[str, list[Operation]]:
    paths: dict[str, list[Operation]] = {}
    for kind, title in (("system", "System"), ("cuda", "Cuda")):
        prefix = f"/v2/{kind}sharedmemory"
        for path, parameters, suffix in ((prefix, (), ""), (f"{prefix}/region/{{region}}", (_REGION,), "Region")):
            paths |= _regions(path, parameters, f"{title}{suffix}", title)
    return paths


def _regions(path: str, parameters: tuple[Part, ...], name: str, title: str) -> dict[str, list[Operation]]:
    category = Category.SHARED_MEMORY
    return {
        f"{path}/status": [
            _get(
                f"status{name}",
                "Registered regions",
                category,
                json_response("The regions.", ref(f"{title}Regions")),
                parameters=parameters,
                errors=(404,) if parameters else (),
            )
        ],
        f"{path}/register": [
            _post(
                f"register{name}",
                "Register a region" if parameters else "Refused: a region needs a name",
                category,
                _EMPTY,
                parameters=parameters,
                body=json_body(ref(f"{title}Registration")),
                errors=(400, 500, 501, 503),
                administers=True,
            )
        ],
        f"{path}/unregister": [
            _post(
                f"unregister{name}",
                "Forget a region" if parameters else "Forget all regions",
                category,
                _EMPTY,
                parameters=parameters,
                errors=(501,),
                administers=True,
            )
        ],
    }
