"""The OpenAPI 3.1 document of the server, made from the models that are loaded. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.access.restricted import Category
from protocols.http.openapi.model import model_paths
from protocols.http.openapi.operation import ADMIN
from protocols.http.openapi.paths import generic_paths
from protocols.http.openapi.schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.spec import ModelSpec
    from protocols.access.restricted import Restrictions
    from protocols.http.openapi.operation import Part

_DESCRIPTION = (
    "KServe's protocol version 2 with Triton's extensions. Bodies may be compressed (Content-Encoding: gzip or "
    'deflate), and so are responses to inference on request (Accept-Encoding). Errors are {"error": text}.'
)


#: Those of the HTTP port.
_CATEGORIES = [category for category in Category if category is not Category.METRICS]


def openapi_document(
    version: str, specs: Iterable[ModelSpec], restrictions: Restrictions, url: str = "http://localhost:8000"
) -> Part:
    """Return the document; `specs` are of the newest ready version of each model, `version` is the server's.

    `url` is where programs on its machine reach it.
    """
    paths = generic_paths()
    for spec in specs:
        paths |= model_paths(spec)
    components: Part = {"schemas": SCHEMAS}
    closed = {category.value: restrictions.of(category) for category in _CATEGORIES}
    closed[ADMIN] = restrictions.admin.key
    schemes = {
        name: {"type": "apiKey", "in": "header", "name": restriction.header}
        for name, restriction in closed.items()
        if restriction is not None
    }
    if schemes:
        components["securitySchemes"] = schemes
    return {
        "openapi": "3.1.0",
        "info": {"title": "Naiad inference server", "version": version, "description": _DESCRIPTION},
        "servers": [
            {"url": "/", "description": "the server that has sent this document"},
            {"url": url, "description": "the server, on its own machine"},
        ],
        "tags": [{"name": category.value} for category in _CATEGORIES],
        "paths": {
            path: {operation.method: operation.render(restrictions) for operation in operations}
            for path, operations in paths.items()
        },
        "components": components,
    }
