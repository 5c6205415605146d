"""`naiad infer`: sends one request to a running server over HTTP, and prints the response.

It uses only the standard library, and NumPy to read a NumPy file. It is not a client library.
"""

from __future__ import annotations

import sys
import urllib.parse
from typing import Any

from kernel.command.infer.arguments import GivenInput, build_inputs, split_arguments
from kernel.command.infer.connection import ClientError, base_url, call, infer, stream
from kernel.command.infer.outputs import build_outputs, classified, format_outputs
from kernel.texts import printable

#: The most models that an error names.
_SHOWN_MODELS = 20


def infer_and_print(url: str, model: str, inputs: list[str], classes: int) -> int:
    """Send a request with `inputs` (`NAME=VALUE`) and print the outputs. Returns the exit code."""
    try:
        _infer_and_print(base_url(url), model, inputs, classes)
    except ClientError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


def _infer_and_print(url: str, model: str, arguments: list[str], classes: int) -> None:
    texts = split_arguments(arguments)
    name, _, version = model.partition(":")
    path = f"{url}/v2/models/{urllib.parse.quote(name, safe='')}"
    if version:
        path += f"/versions/{urllib.parse.quote(version, safe='')}"
    try:
        metadata = call(path)
    except ClientError as error:
        raise ClientError(f"{error}{_models_hint(url, str(error))}") from None
    config = call(f"{path}/config")
    tensors = build_inputs(metadata, config, texts)
    if config.get("model_transaction_policy", {}).get("decoupled"):
        _print_stream(path, tensors)
        return
    outputs = build_outputs(metadata, config, classes)
    request = {"inputs": [_json_of(tensor) for tensor in tensors], "outputs": outputs}
    response, binary = infer(f"{path}/infer", request, b"".join(tensor.raw for tensor in tensors))
    for line in format_outputs(response, binary, classified(outputs)):
        _print_line(line)


def _json_of(tensor: GivenInput) -> dict[str, Any]:
    parameters = {"binary_data_size": len(tensor.raw)}
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "parameters": parameters}


def _print_stream(path: str, tensors: list[GivenInput]) -> None:
    """Print the responses of a decoupled model, which come as JSON."""
    for event in stream(f"{path}/generate_stream", {tensor.name: _json_elements(tensor) for tensor in tensors}):
        shown = ", ".join(f"{k} = {v}" for k, v in event.items() if k not in ("model_name", "model_version"))
        _print_line(printable(shown, keep="\n\t"))


def _json_elements(tensor: GivenInput) -> list[Any]:
    return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in tensor.elements]


def _models_hint(url: str, message: str) -> str:
    """Return what to say behind an error about a model that is not there: which there are."""
    if "unknown model" not in message:
        return ""
    try:
        names = sorted({item["name"] for item in call(f"{url}/v2/repository/index", {"ready": True})})
    except (ClientError, KeyError, TypeError):  # the server keeps that to itself
        return ""
    more = f" and {len(names) - _SHOWN_MODELS} more" if len(names) > _SHOWN_MODELS else ""
    return f"; the server has {', '.join(names[:_SHOWN_MODELS]) or 'no model'}{more}"


def _print_line(line: str) -> None:
    print(line, flush=True)
