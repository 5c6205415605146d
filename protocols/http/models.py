"""Metadata of the server and its models, configurations, statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel.catalog import parse_version
from kernel.config.to_json import to_json
from kernel.describe import model_metadata
from kernel.errors import InvalidArgument
from protocols.http.replies import json_reply, json_text_reply

if TYPE_CHECKING:
    from aiohttp import web

    from kernel.model import Model
    from protocols.http.call import Call


async def server_metadata(call: Call) -> web.Response:
    return json_reply(call.kernel.identity)


async def metadata(call: Call) -> web.Response:
    """Describe a model with the version that was asked for, or all that are ready."""
    name, version = call.names["model"], call.names["version"]
    model = call.kernel.resolve(name, version)
    versions = [model.version]
    if not version:
        versions = [ready.version for ready in call.kernel.catalog.ready_models(name)]
    return json_reply(model_metadata(model.spec, versions))


async def config(call: Call) -> web.Response:
    return json_text_reply(to_json(call.kernel.resolve(call.names["model"], call.names["version"]).config))


async def statistics(call: Call) -> web.Response:
    """Report on a version, the ready versions of a model, or all that is ready."""
    return json_reply({"model_stats": [model_statistics(model) for model in _with_statistics(call)]})


def _with_statistics(call: Call) -> list[Model]:
    name, version = call.names.get("model", ""), call.names.get("version", "")
    models = call.kernel.catalog.ready_models(name)
    if name and not models:
        raise InvalidArgument(f"requested model '{name}' is not available")
    if version:
        number = parse_version(version)
        models = [model for model in models if model.version == number]
        if not models:
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
    return models


def model_statistics(model: Model) -> dict[str, Any]:
    """Return what /stats shows of one version."""
    counted = model.statistics
    return {
        "name": model.name,
        "version": model.version_text,
        "last_inference": counted.last_inference_ms,
        "inference_count": counted.inference_count,
        "execution_count": counted.execution_count,
        "inference_stats": {
            "success": counted.success,
            "fail": counted.fail,
            "queue": counted.queue,
            "compute_input": counted.compute_input,
            "compute_infer": counted.compute_infer,
            "compute_output": counted.compute_output,
            "cache_hit": counted.cache_hit,
            "cache_miss": counted.cache_miss,
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": batch.compute_input,
                "compute_infer": batch.compute_infer,
                "compute_output": batch.compute_output,
            }
            for rows, batch in sorted(counted.batches.items())
        ],
        "memory_usage": [],
    }
