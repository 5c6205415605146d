"""The server that `naiad infer` asks, the same over HTTP and gRPC. The client for gRPC is imported only if needed."""

from __future__ import annotations

import importlib
import urllib.parse
from typing import TYPE_CHECKING, Any, Protocol

from kernel.command.infer.connection import ClientError, call, infer, speaks_http2, stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.command.infer.arguments import GivenInput

#: gRPC of a server whose HTTP port has its usual number is at the usual port of gRPC, as with Triton.
GRPC_PORTS = {8000: 8001}

#: The module of the client for gRPC. It is imported by its name: no package may import one above it.
_GRPC_CLIENT = "protocols.clients.grpc_infer"

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
        self._model = f"{url}/v2/models/{urllib.parse.quote(name, safe='')}"
        if version:
            self._model += f"/versions/{urllib.parse.quote(version, safe='')}"

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


class _GrpcModule(Protocol):
    def connect(self, host: str, port: int, *, tls: bool, model: str, version: str) -> InferServer:
        """Return a model of the server at a gRPC port."""


def grpc_server(url: str, name: str, version: str) -> InferServer:
    """Return the server at the gRPC port `url`; of the schemes, `https` and `grpcs` mean TLS. Raises `ClientError`."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ClientError(f"'{url}' is not an address of a server: {error}") from None
    if not parts.hostname or port is None:
        raise ClientError(f"'{url}' is not an address of a server: give HOST:PORT")
    module: _GrpcModule = importlib.import_module(_GRPC_CLIENT)
    return module.connect(parts.hostname, port, tls=parts.scheme in ("https", "grpcs"), model=name, version=version)


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
