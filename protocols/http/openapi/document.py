"""The OpenAPI 3.1 document of the server, made from the models that are loaded. Pure.

First the document as a whole, then the paths that a loaded model adds: its own inputs, outputs and an example.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from protocols.access import Category
from protocols.http.openapi.paths import (
    ADMIN,
    BINARY,
    JSON,
    generate_operation,
    generate_stream_operation,
    generic_paths,
    infer_operation,
    ref,
)
from protocols.http.openapi.schemas import ELEMENTS, SCHEMAS, array, obj
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.spec import ModelSpec, TensorSpec
    from protocols.access import Restrictions
    from protocols.http.openapi.paths import Operation, Part

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


#: Names that need no escaping in a path. Other models have the generic paths only.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@-]+")

#: An example with more elements helps no reader.
_MAX_EXAMPLE_ELEMENTS = 64

_EXAMPLE_ELEMENTS: dict[str, Any] = {"BOOL": True, "BYTES": "text", "FP32": 0.5, "FP64": 0.5}


def model_paths(spec: ModelSpec) -> dict[str, list[Operation]]:
    """Return the operations of the inference paths of a model."""
    if _PLAIN_NAME.fullmatch(spec.name) is None:
        return {}
    prefix = f"/v2/models/{spec.name}"
    paths: dict[str, list[Operation]] = {}
    if _can_be_generated(spec):
        flat = _flat_request(spec)
        paths[f"{prefix}/generate"] = [generate_operation(f"{spec.name}.generate", flat, _flat_response(spec))]
        paths[f"{prefix}/generate_stream"] = [generate_stream_operation(f"{spec.name}.generate_stream", flat)]
    if not spec.decoupled:
        summary = f"Inference with the model {spec.name}"
        body = _infer_body(spec)
        paths[f"{prefix}/infer"] = [infer_operation(f"{spec.name}.infer", summary, body, _infer_response(spec))]
    return paths


# ---- infer ----------------------------------------------------------------------------------


def _infer_body(spec: ModelSpec) -> Part:
    """Return the content of a request; without JSON where an input cannot be sent in it."""
    if any(tensor.datatype not in ELEMENTS for tensor in spec.inputs.values()):
        return {BINARY: {}}
    outputs = array(obj({"name": {"enum": list(spec.outputs)}, "parameters": {"type": "object"}}, ("name",)))
    schema = obj(
        {
            "id": {"type": "string"},
            "parameters": ref("Parameters"),
            "inputs": {
                "type": "array",
                "items": {"anyOf": [_infer_input(spec, tensor) for tensor in spec.inputs.values()]},
                "minItems": len(spec.required_inputs),
                "maxItems": len(spec.inputs),
                "description": f"Each of {', '.join(spec.inputs)} once." if len(spec.inputs) > 1 else "The only input.",
            },
            "outputs": {**outputs, "description": "Without them the response has all outputs."},
        },
        ("inputs",),
    )
    content: Part = {"schema": schema}
    example = [_example_input(tensor) for tensor in spec.inputs.values()]
    if all(tensor is not None for tensor in example):
        content["example"] = {"inputs": example}
    return {JSON: content, BINARY: {}}


def _infer_input(spec: ModelSpec, tensor: TensorSpec) -> Part:
    dims = [_dim(dim) for dim in tensor.shape]
    if spec.max_batch_size > 0:
        dims[0] = {"type": "integer", "minimum": 0, "maximum": spec.max_batch_size}
    data = array(ELEMENTS[tensor.datatype])
    if -1 not in tensor.shape:
        count = element_count(tensor.shape)
        data |= {"minItems": count, "maxItems": count}
    return obj(
        {
            "name": {"const": tensor.name},
            "datatype": {"const": tensor.datatype},
            "shape": {"type": "array", "prefixItems": dims, "items": False, "minItems": len(dims)}
            if dims
            else {"type": "array", "maxItems": 0},
            "data": data,
        },
        ("name", "datatype", "shape", "data"),
    )


def _dim(dim: int) -> Part:
    return {"const": dim} if dim != -1 else {"type": "integer", "minimum": 0}


def _example_input(tensor: TensorSpec) -> Part | None:
    """Return a tensor in JSON; None if it would be too large, or JSON cannot carry it."""
    shape = [1 if dim == -1 else dim for dim in tensor.shape]
    count = element_count(shape)
    if count > _MAX_EXAMPLE_ELEMENTS or tensor.datatype not in ELEMENTS:
        return None
    data = [_EXAMPLE_ELEMENTS.get(tensor.datatype, 1)] * count
    return {"name": tensor.name, "shape": shape, "datatype": tensor.datatype, "data": data}


def _infer_response(spec: ModelSpec) -> Part:
    output = obj(
        {
            "name": {"enum": list(spec.outputs)},
            # Not the configured shape where classes are requested.
            "datatype": {"enum": list(DATATYPES)},
            "shape": array({"type": "integer", "minimum": 0}),
            "data": {"type": "array"},
            "parameters": {"type": "object"},
        },
        ("name", "datatype", "shape"),
    )
    return obj(
        {
            "id": {"type": "string"},
            "model_name": {"const": spec.name},
            "model_version": {"type": "string"},
            "parameters": {"type": "object"},
            "outputs": array(output),
        },
        ("model_name", "model_version", "outputs"),
    )


# ---- generate -------------------------------------------------------------------------------


def _can_be_generated(spec: ModelSpec) -> bool:
    """Whether a flat object can have every input that a request needs."""
    needed = [spec.inputs[name].datatype for name in spec.required_inputs]
    return "parameters" not in spec.inputs and all(datatype in ELEMENTS for datatype in needed)


def _flat_request(spec: ModelSpec) -> Part:
    names = [name for name, tensor in spec.inputs.items() if tensor.datatype in ELEMENTS]
    elements = {name: ELEMENTS[spec.inputs[name].datatype] for name in names}
    inputs = {name: {"anyOf": [element, array(element)]} for name, element in elements.items()}
    schema = obj(
        {"id": {"type": "string"}, **inputs, "parameters": {"type": "object"}},
        spec.required_inputs,
        description="Other members are parameters of the model.",
        additionalProperties={"type": ["string", "number", "boolean"]},
    )
    example = {name: _example_input(spec.inputs[name]) for name in names}
    if all(tensor is not None for tensor in example.values()):
        schema["examples"] = [{name: tensor["data"] for name, tensor in example.items() if tensor is not None}]
    return schema


def _flat_response(spec: ModelSpec) -> Part:
    return obj(
        {"model_name": {"const": spec.name}, "model_version": {"type": "string"}, "id": {"type": "string"}},
        ("model_name", "model_version"),
        description=f"With the outputs {', '.join(spec.outputs)}.",
    )
