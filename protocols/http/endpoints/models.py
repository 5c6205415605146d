"""Metadata of the server and its models, configurations, statistics, and whether server and models are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.to_text import to_json
from kernel.errors import InvalidArgument, ModelNotFound, ModelNotReady, NoAvailableVersion
from kernel.serving.model_figures import model_metadata, model_report
from protocols.http.responses import empty_response, json_response, json_text_response

if TYPE_CHECKING:
    from kernel.serving.model_figures import ModelFigures
    from protocols.http import web
    from protocols.http.call import HttpCall


async def server_metadata(call: HttpCall) -> web.Response:
    return json_response(call.kernel.identity)


async def openapi(call: HttpCall) -> web.Response:
    """Return the OpenAPI document of the server and the models that are ready."""
    return json_text_response(await call.door.openapi.text())


async def metadata(call: HttpCall) -> web.Response:
    """Return the metadata of a model with the requested version, or with all that are ready."""
    name, version = call.names["model"], call.names["version"]
    model = call.kernel.served_figures(name, version)
    versions = [model.version]
    if not version:
        versions = [ready.version for ready in call.kernel.figures(name)]
    return json_response(model_metadata(model.spec, versions))


async def config(call: HttpCall) -> web.Response:
    served = call.kernel.served_figures(call.names["model"], call.names["version"])
    return json_text_response(to_json(served.config).encode())


async def clear_poison(call: HttpCall) -> web.Response:
    """Forget the requests that are refused because equal ones have ended workers; returns how many these were."""
    return json_response({"cleared": call.kernel.clear_poison(call.names["model"], call.names["version"])})


async def statistics(call: HttpCall) -> web.Response:
    """Return the statistics of a version, of the ready versions of a model, or of all ready models."""
    return json_response({"model_stats": [model_report(model) for model in _with_statistics(call)]})


def _with_statistics(call: HttpCall) -> list[ModelFigures]:
    name, version = call.names.get("model", ""), call.names.get("version", "")
    models = call.kernel.figures(name)
    if name and not models:
        raise InvalidArgument(f"requested model '{name}' is not available")
    if version:
        number = call.kernel.catalog.number_of(name, version)
        models = [model for model in models if model.version == number]
        if not models:
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
    return models


async def live(call: HttpCall) -> web.Response:
    return empty_response(plain=True, status=200 if call.kernel.live() else 400)


async def ready(call: HttpCall) -> web.Response:
    return empty_response(plain=True, status=200 if await call.kernel.server_is_ready() else 400)


async def model_ready(call: HttpCall) -> web.Response:
    """Respond whether a version is ready; one that does not exist is not ready (Triton)."""
    try:
        found = await call.kernel.model_is_ready(call.names["model"], call.names["version"])
    except (ModelNotFound, NoAvailableVersion, ModelNotReady):
        found = False
    if not found:
        raise InvalidArgument("Model version not ready")
    return empty_response(plain=True)
