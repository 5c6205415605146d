"""The outputs of `naiad infer`: which are requested as classes, and the lines that show them. Pure.

`naiad infer --json`: each response is a line of JSON, in the form that a KServe v2 server has for it. Pure.

`{"model_name": ..., "model_version": ..., "outputs": [{"name": ..., "datatype": ..., "shape": [...], "data": [...]}]}`
has all elements of the outputs. What JSON cannot have is written as in the JSON of protobuf and of TensorFlow Serving:
"NaN", "Infinity" and "-Infinity", and `{"b64": ...}` for BYTES that are not UTF-8.
"""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any

from kernel.texts import printable
from kernel.tools.client import ClientError
from kernel.tools.elements import decode_elements
from kernel.tools.infer_arguments import choose_shape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

#: The number of best classes shown for an output with labels, without --classes.
DEFAULT_CLASSES = 3

#: The most values of an output that are shown.
SHOWN_VALUES = 32

#: Datatypes of which a server makes no classes.
_WITHOUT_CLASSES = ("BOOL", "BYTES", "FP16", "BF16")


def build_outputs(metadata: dict[str, Any], config: dict[str, Any], classes: int) -> list[dict[str, Any]]:
    """Request every output as raw bytes; request the best classes if the output has labels or `classes` is not 0.

    Raises `ClientError` if no output can have the classes that are wanted.
    """
    labelled = {output["name"] for output in config.get("output", []) if output.get("label_filename")}
    outputs: list[dict[str, Any]] = []
    for tensor in metadata["outputs"]:
        parameters: dict[str, Any] = {"binary_data": True}
        if (classes or tensor["name"] in labelled) and tensor["datatype"] not in _WITHOUT_CLASSES:
            parameters["classification"] = classes or DEFAULT_CLASSES
        outputs.append({"name": tensor["name"], "parameters": parameters})
    if classes and not classified(outputs):
        found = ", ".join(f"{tensor['name']} ({tensor['datatype']})" for tensor in metadata["outputs"])
        raise ClientError(f"--classes: numbers have classes, and model '{metadata['name']}' has only {found}")
    return outputs


def classified(requested: list[dict[str, Any]]) -> set[str]:
    """Return the names of outputs that are requested as classes."""
    return {output["name"] for output in requested if "classification" in output["parameters"]}


def format_outputs(response: dict[str, Any], binary: bytes, classes: Collection[str]) -> Iterator[str]:
    """Yield the lines that show the outputs of a response; `binary` is what stands behind its JSON.

    `classes` names the outputs that are classes. Raises `ClientError` for a response that cannot be read.
    """
    position = 0
    for output in response.get("outputs", ()):
        shape = "x".join(map(str, output["shape"])) or "scalar"
        yield f"{printable(output['name'])}  {output['datatype']} {shape}"
        byte_size = output.get("parameters", {}).get("binary_data_size")
        if byte_size is None:
            values, count = output.get("data", []), len(output.get("data", []))
        else:
            data = binary[position : position + byte_size]
            position += byte_size
            values, count = _values(output, data)
        yield from _lines(output["datatype"], values[:SHOWN_VALUES], is_classes=output["name"] in classes)
        if count > SHOWN_VALUES:
            yield f"  … and {count - SHOWN_VALUES} more"


def format_streamed(response: dict[str, Any], binary: bytes, classes: Collection[str]) -> str:
    """Return the line of one of many responses: each output with its elements. The arguments are as above."""
    parts = []
    position = 0
    for output in response.get("outputs", ()):
        byte_size = output["parameters"]["binary_data_size"]
        values, count = _values(output, binary[position : position + byte_size])
        position += byte_size
        if output["name"] in classes:
            parts.append(
                _part(output["name"], [" ".join(_classes_line(_text(each)).split()) for each in values], count)
            )
        else:
            parts.append(_part(output["name"], values, count))
    return ", ".join(parts)


def format_event(event: dict[str, Any], metadata: dict[str, Any]) -> str:
    """Return the line of a response that came as JSON: output name → element, or list of elements.

    The outputs have their order in the model's `metadata`; parameters of the response come after them.
    """
    outputs = [tensor["name"] for tensor in metadata["outputs"] if tensor["name"] in event]
    names = [*outputs, *(name for name in event if name not in outputs)]
    lists = {name: event[name] if isinstance(event[name], list) else [event[name]] for name in names}
    return ", ".join(_part(name, values[:SHOWN_VALUES], len(values)) for name, values in lists.items())


def _part(name: str, values: list[Any], count: int) -> str:
    shown = [_text(each) if isinstance(each, (bytes, str)) else _number(each) for each in values]
    if count == 1 and shown:
        return f"{printable(name)} = {shown[0]}"
    more = f", … and {count - SHOWN_VALUES} more" if count > SHOWN_VALUES else ""
    return f"{printable(name)} = [{', '.join(shown)}{more}]"


def _values(output: dict[str, Any], data: bytes) -> tuple[list[Any], int]:
    """Return the first values of an output, and how many it has."""
    count = 1
    for dim in output["shape"]:
        count *= dim
    try:
        return decode_elements(output["datatype"], data, SHOWN_VALUES), count
    except ValueError as error:
        raise ClientError(f"output '{output['name']}' cannot be read: {error}") from None


def _lines(datatype: str, values: list[Any], *, is_classes: bool) -> Iterator[str]:
    if not values:
        yield "  no elements"
    elif datatype != "BYTES":
        yield "  " + ", ".join(map(_number, values))
    else:
        for value in values:
            text = _text(value)
            yield "  " + (_classes_line(text) if is_classes else text)


def _text(value: bytes | str) -> str:
    """Return a BYTES element for a terminal: as text, or as bytes if it is not UTF-8."""
    try:
        text = value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        return repr(value)
    return printable(text, keep="\n\t")


def _classes_line(element: str) -> str:
    """Format `0.981234:7:seven` as a class and its score; return any other text unchanged."""
    score, _, rest = element.partition(":")
    index, _, label = rest.partition(":")
    try:
        value = float(score)
    except ValueError:
        return element
    if not index.isdigit():
        return element
    return f"{label or index:<20} {value:g}"


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
