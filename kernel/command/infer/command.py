"""`naiad infer`: sends one request to a running server over HTTP or gRPC, and prints the response or responses.

HTTP uses only the standard library. Raw bytes of several responses come over gRPC. It is not a client library.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from kernel.command.infer.arguments import build_inputs, split_arguments
from kernel.command.infer.connection import ClientError, GrpcPort, base_url
from kernel.command.infer.json_lines import event_line, response_line
from kernel.command.infer.outputs import build_outputs, classified, format_event, format_outputs, format_streamed
from kernel.command.infer.server import HttpInferServer, check_for_json, grpc_beside, grpc_server
from kernel.texts import printable

if TYPE_CHECKING:
    from kernel.command.infer.arguments import GivenInput
    from kernel.command.infer.server import InferServer

#: The most models that an error names.
_SHOWN_MODELS = 20

#: Schemes of addresses that are not HTTP's.
_GRPC_SCHEMES = ("grpc://", "grpcs://")


def infer_and_print(url: str, model: str, inputs: list[str], classes: int, *, as_json: bool = False) -> int:
    """Send a request with `inputs` (`NAME=VALUE`) and print the outputs. Returns the exit code.

    `url` is the address of an HTTP or gRPC port. With `as_json` each response is a line of JSON.
    """
    try:
        _infer_and_print(url, model, inputs, classes, as_json=as_json)
    except ClientError as error:
        # An exception of a model has a line for each frame.
        print(f"error: {printable(str(error).rstrip(), keep=chr(10))}", file=sys.stderr)
        return 1
    return 0


def _infer_and_print(url: str, model: str, arguments: list[str], classes: int, *, as_json: bool) -> None:
    texts = split_arguments(arguments)
    name, _, version = model.partition(":")
    with contextlib.ExitStack() as stack:
        server, metadata = _open(stack, url, name, version)
        config = server.config()
        inputs = build_inputs(metadata, config, texts)
        # A program gets the tensors themselves: labels stand for their best classes only on a terminal.
        outputs = build_outputs(metadata, {} if as_json else config, classes)
        decoupled = config.get("model_transaction_policy", {}).get("decoupled")
        if not decoupled and not as_json:
            for response, binary in server.responses(inputs, outputs):
                for line in format_outputs(response, binary, classified(outputs)):
                    _print_line(line)
            return
        if decoupled and isinstance(server, HttpInferServer):
            beside = _stream_server(stack, server, metadata, name, version)
            if beside is None:
                _print_events(server, metadata, inputs, classes, as_json=as_json)
                return
            server = beside
        for response, binary in server.responses(inputs, outputs):
            _print_line(
                response_line(response, binary) if as_json else format_streamed(response, binary, classified(outputs))
            )


def _open(stack: contextlib.ExitStack, url: str, name: str, version: str) -> tuple[InferServer, dict[str, Any]]:
    """Return the server at `url` and the metadata of the model; `stack` closes the server."""
    if url.startswith(_GRPC_SCHEMES):
        server: InferServer = grpc_server(url, name, version)
    else:
        server = HttpInferServer(base_url(url), name, version)
        try:
            return server, _metadata(server)
        except GrpcPort:
            server = grpc_server(base_url(url), name, version)
    stack.callback(server.close)
    return server, _metadata(server)


def _metadata(server: InferServer) -> dict[str, Any]:
    try:
        return server.metadata()
    except GrpcPort:
        raise
    except ClientError as error:
        raise ClientError(f"{error}{_models_hint(server, str(error))}") from None


def _stream_server(
    stack: contextlib.ExitStack, server: HttpInferServer, metadata: dict[str, Any], name: str, version: str
) -> InferServer | None:
    """Return the gRPC port of the server, if it has its usual number and the same model; else None."""
    url = grpc_beside(server.url)
    if url is None:
        return None
    beside = grpc_server(url, name, version)
    stack.callback(beside.close)
    try:
        found = beside.metadata()
    except ClientError:
        return None
    return beside if all(found[key] == metadata[key] for key in ("inputs", "outputs")) else None


def _print_events(
    server: HttpInferServer, metadata: dict[str, Any], inputs: list[GivenInput], classes: int, *, as_json: bool
) -> None:
    """Print the responses of a decoupled model that come as JSON."""
    check_for_json(metadata, classes)
    for event in server.events(inputs):
        _print_line(event_line(event, metadata) if as_json else format_event(event, metadata))


def _models_hint(server: InferServer, message: str) -> str:
    """Return what to say behind an error about a model that is not there: which there are."""
    if "unknown model" not in message:
        return ""
    try:
        names = server.model_names()
    except (ClientError, KeyError, TypeError):  # the server keeps that to itself
        return ""
    more = f" and {len(names) - _SHOWN_MODELS} more" if len(names) > _SHOWN_MODELS else ""
    return f"; the server has {', '.join(names[:_SHOWN_MODELS]) or 'no model'}{more}"


def _print_line(line: str) -> None:
    print(line, flush=True)
