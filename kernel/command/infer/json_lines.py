"""`naiad infer --json`: each response is a line of JSON, in the form that a KServe v2 server has for it. Pure.

`{"model_name": ..., "model_version": ..., "outputs": [{"name": ..., "datatype": ..., "shape": [...], "data": [...]}]}`
has all elements of the outputs. What JSON cannot have is written as in the JSON of protobuf and of TensorFlow Serving:
"NaN", "Infinity" and "-Infinity", and `{"b64": ...}` for BYTES that are not UTF-8.
"""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

from kernel.command.infer.arguments import choose_shape
from kernel.command.infer.connection import ClientError
from kernel.command.infer.elements import decode_elements

if TYPE_CHECKING:
    from collections.abc import Mapping


def response_line(response: Mapping[str, Any], binary: bytes) -> str:
    """Return the line of a response; `binary` is what stands behind its JSON. Raises `ClientError`."""
    position = 0
    outputs = []
    for output in response.get("outputs", ()):
        parameters = dict(output.get("parameters", {}))
        byte_size = parameters.pop("binary_data_size", None)
        if byte_size is None:
            elements = output.get("data", [])
        else:
            elements = _elements(output, binary[position : position + byte_size])
            position += byte_size
        outputs.append(_output(output["name"], output["datatype"], output["shape"], elements, parameters))
    return _line({**response, "outputs": outputs})


def event_line(event: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return the line of a response of /generate_stream: output name → element, or list of elements.

    Such a response has no shapes: they are taken from the model's `metadata`, with sizes that fit.
    """
    outputs = []
    for tensor in metadata["outputs"]:
        if tensor["name"] in event:
            value = event[tensor["name"]]
            elements = value if isinstance(value, list) else [value]
            shape = choose_shape(tensor["shape"], [len(elements)], len(elements)) or [len(elements)]
            outputs.append(_output(tensor["name"], tensor["datatype"], shape, elements, {}))
    names = {output["name"] for output in outputs}
    parameters = {name: value for name, value in event.items() if name not in names}
    document = {"model_name": metadata["name"], "outputs": outputs}
    return _line({**document, "parameters": parameters} if parameters else document)


def _elements(output: Mapping[str, Any], data: bytes) -> list[Any]:
    try:
        return decode_elements(output["datatype"], data, math.prod(output["shape"]))
    except ValueError as error:
        raise ClientError(f"output '{output['name']}' cannot be read: {error}") from None


def _output(
    name: str, datatype: str, shape: list[int], elements: list[Any], parameters: dict[str, Any]
) -> dict[str, Any]:
    found = {"name": name, "datatype": datatype, "shape": shape, "data": [_element(each) for each in elements]}
    return {**found, "parameters": parameters} if parameters else found


def _element(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"b64": base64.b64encode(value).decode()}
    return value


def _line(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)
