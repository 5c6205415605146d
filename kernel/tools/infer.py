"""`naiad infer`: sends one request to a running server over HTTP or gRPC, and prints the response or responses.

`InferServer` is the server, the same over both. HTTP uses only the standard library. Raw bytes of several responses
come over gRPC, whose client is imported only if it is needed. It is not a client library.
"""

from __future__ import annotations

import contextlib
import importlib
import urllib.parse
from typing import TYPE_CHECKING, Any, Protocol

from kernel.tools.client import ClientError, GrpcPort, base_url, call, infer, model_path, speaks_http2, stream
from kernel.tools.infer_arguments import build_inputs, split_arguments
from kernel.tools.infer_outputs import (
    build_outputs,
    classified,
    event_line,
    format_event,
    format_outputs,
    format_streamed,
    response_line,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.tools.infer_arguments import GivenInput

#: gRPC of a server whose HTTP port has its usual number is at the usual port of gRPC, as with Triton.
GRPC_PORTS = {8000: 8001}

#: The module of the client for gRPC. It is imported by its name: no package may import one above it.
_GRPC_CLIENT = "protocols.clients.grpc_client"

#: Datatypes whose elements the JSON of a server cannot have.
_NOT_IN_JSON = ("FP16", "BF16")

Response = tuple[dict[str, Any], bytes]


class InferServer(Protocol):
    """A server and one of its models. Every method may raise `ClientError`."""

    def metadata(self) -> dict[str, Any]:
        """Return the model's metadata as JSON has it."""

    def config(self) -> dict[str, Any]:
        """Return the model's configuration as JSON has it."""

    def model_names(self) -> list[str]:
        """Return the names of the models that are ready, sorted."""

    def responses(self, inputs: list[GivenInput], outputs: list[dict[str, Any]]) -> Iterator[Response]:
        """Send a request and yield its responses as they come: as in HTTP, the JSON and the raw bytes behind it."""

    def close(self) -> None:
        """Close the connection, also while a response is due."""


class HttpInferServer:
    """An HTTP port. An `InferServer` with one response; `events` are the responses of a decoupled model."""

    def __init__(self, url: str, name: str, version: str) -> None:
        """`version` is "" for the one that the server chooses."""
        self.url = url
        self._model = url + model_path(name, version)

    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = call(self._model)
        return found

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = call(f"{self._model}/config")
        return found

    def model_names(self) -> list[str]:
        return sorted({item["name"] for item in call(f"{self.url}/v2/repository/index", {"ready": True})})

    def responses(self, inputs: list[GivenInput], outputs: list[dict[str, Any]]) -> Iterator[Response]:
        request = {"inputs": [_json_of(tensor) for tensor in inputs], "outputs": outputs}
        yield infer(f"{self._model}/infer", request, b"".join(tensor.raw for tensor in inputs))

    def events(self, inputs: list[GivenInput]) -> Iterator[dict[str, Any]]:
        """Send a request to a decoupled model and yield its responses: output name → element, or list of elements."""
        for event in stream(f"{self._model}/generate_stream", {each.name: _json_elements(each) for each in inputs}):
            yield {name: value for name, value in event.items() if name not in ("model_name", "model_version")}

    def close(self) -> None:
        """See `InferServer`. Each call has a connection of its own."""


def _json_of(tensor: GivenInput) -> dict[str, Any]:
    parameters = {"binary_data_size": len(tensor.raw)}
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "parameters": parameters}


def _json_elements(tensor: GivenInput) -> list[Any]:
    return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in tensor.elements]


def grpc_server(url: str, name: str, version: str) -> InferServer:
    """Return the server at the gRPC port `url`; of the schemes, `https` and `grpcs` mean TLS. Raises `ClientError`."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ClientError(f"'{url}' is not an address of a server: {error}") from None
    if not parts.hostname or port is None:
        raise ClientError(f"'{url}' is not an address of a server: give HOST:PORT")
    server: InferServer = importlib.import_module(_GRPC_CLIENT).GrpcInferServer(
        parts.hostname, port, tls=parts.scheme in ("https", "grpcs"), model=name, version=version
    )
    return server


def grpc_beside(http_url: str) -> str | None:
    """Return the URL of the gRPC port of the server whose HTTP port has its usual number; None if none is there."""
    parts = urllib.parse.urlsplit(http_url)
    port = GRPC_PORTS.get(parts.port or 0)
    if parts.scheme != "http" or parts.path or port is None:
        return None
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    url = f"http://{host}:{port}"
    return url if speaks_http2(url) else None


def check_for_json(metadata: dict[str, Any], classes: int) -> None:
    """Raise `ClientError` if the responses of a decoupled model cannot be had over HTTP, where they are JSON."""
    wanted = "give the address of the server's gRPC port: --url HOST:PORT"
    if classes:
        raise ClientError(f"--classes: over HTTP a stream of responses has no classes; {wanted}")
    for kind in ("inputs", "outputs"):
        for tensor in metadata[kind]:
            if tensor["datatype"] in _NOT_IN_JSON:
                raise ClientError(
                    f"{kind[:-1]} '{tensor['name']}' is {tensor['datatype']}, and over HTTP a stream of responses is "
                    f"JSON, which has no form for it; {wanted}"
                )


#: The most models that an error names.
_SHOWN_MODELS = 20

#: Schemes of addresses that are not HTTP's.
_GRPC_SCHEMES = ("grpc://", "grpcs://")


def infer_and_print(url: str, model: str, arguments: list[str], classes: int, *, as_json: bool = False) -> None:
    """Send a request with inputs, `NAME=VALUE`, and print the outputs. Raises `ClientError`.

    `url` is the address of an HTTP or gRPC port. With `as_json` each response is a line of JSON.
    """
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
