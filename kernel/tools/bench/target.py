"""The server that `naiad bench` measures, the same over HTTP and gRPC: what it says, and one request that is read.

`wrong_response` says whether a response is what the metadata of its model promises.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import socket
import urllib.parse
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from kernel.tools.bench.requests import PLACEHOLDER_ID, HttpEncoding
from kernel.tools.client import ClientError, base_url, call, model_path, speaks_http2
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.tools.bench.requests import BenchRequest

#: The modules of the protocols, by their names: no package may import one above it.
_STATES = {"http": "protocols.clients.http_load", "grpc": "protocols.clients.grpc_load"}

_GRPC_TARGET = "protocols.clients.grpc_client"

#: Seconds until the one request that is read must have its response.
_PROBE_TIMEOUT_S = 300.0

_BINARY_EXTENSION = "binary_tensor_data"


class FoundOutput(msgspec.Struct, frozen=True):
    """An output of a response that was read."""

    name: str
    datatype: str
    shape: list[int]
    #: Its raw bytes; None where it was not sent as such.
    byte_size: int | None = None


class BenchTarget(Protocol):
    """A server and one of its models. Every method may raise `ClientError`."""

    #: As people wrote it, `http` or `grpc`, and where its port is.
    label: str
    protocol: str
    host: str
    port: int

    def server(self) -> dict[str, Any]:
        """Return the metadata of the server."""

    def metadata(self) -> dict[str, Any]:
        """Return the model's metadata as JSON has it."""

    def config(self) -> dict[str, Any] | None:
        """Return the model's configuration as JSON has it; None where the server does not say."""

    def statistics(self) -> list[dict[str, Any]] | None:
        """Return the statistics of the model's versions as JSON has them; None where the server has none."""

    def head(self) -> bytes:
        """Return what each connection sends before a request: the headers of gRPC."""

    def encode(self, request: BenchRequest) -> list[bytes]:
        """Return the parts of a request as a load process sends it."""

    def probe(self, parts: list[bytes]) -> list[FoundOutput]:
        """Send a request, wait for its first response with outputs, and return these."""

    def register(self, name: str, key: str, byte_size: int) -> None:
        """Register a region of shared memory."""

    def unregister(self, name: str) -> None:
        """Unregister a region."""

    def load(self, config: dict[str, Any] | None) -> None:
        """Load the model again: with another configuration, or with the one in its repository."""

    def close(self) -> None:
        """Close the connection."""


class TargetSettings(msgspec.Struct, frozen=True):
    """What the command line says about a server."""

    model: str
    version: str
    #: "", `http` or `grpc`.
    protocol: str
    headers: dict[str, str]
    streaming: bool
    #: `auto`, `binary` or `json`.
    tensors: str


def state_module(protocol: str) -> str:
    """Return the name of the module with the state of a connection."""
    return _STATES[protocol]


def open_target(address: str, settings: TargetSettings) -> BenchTarget:
    """Return the server at an address. Raises `ClientError`."""
    text = address.replace("grpc://", "http://", 1) if address.startswith("grpc://") else address
    protocol = settings.protocol or ("grpc" if address.startswith("grpc://") else "")
    url = base_url(text)
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ClientError(f"'{address}' is not an address of a server: {error}") from None
    if parts.scheme == "https":
        raise ClientError(f"'{address}': TLS is not measured here; give the address of a port without it")
    if not parts.hostname:
        raise ClientError(f"'{address}' is not an address of a server: give HOST:PORT")
    if not protocol:
        protocol = "grpc" if speaks_http2(url) else "http"
    if port is None:
        port = 8001 if protocol == "grpc" else 8000
    if protocol == "http":
        return HttpBenchTarget(address, parts.hostname, port, parts.path, settings)
    target: BenchTarget = importlib.import_module(_GRPC_TARGET).GrpcBenchTarget(address, parts.hostname, port, settings)
    return target


class HttpBenchTarget:
    """A server's HTTP port. A `BenchTarget`."""

    protocol = "http"

    def __init__(self, label: str, host: str, port: int, path: str, settings: TargetSettings) -> None:
        if path:
            raise ClientError(f"'{label}': give the address without a path")
        self.label, self.host, self.port = label, host, port
        self._authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._url = f"http://{self._authority}"
        self._settings = settings
        self._model = self._url + model_path(settings.model, settings.version)
        self._encoding: HttpEncoding | None = None

    def server(self) -> dict[str, Any]:
        found: dict[str, Any] = self._call(f"{self._url}/v2")
        if not isinstance(found, dict):
            raise ClientError(f"{self._url} is no inference server: GET /v2 does not describe it")
        return found

    def metadata(self) -> dict[str, Any]:
        found = self._call(self._model)
        try:
            return {**found, **{kind: _tensors(found.get(kind) or []) for kind in ("inputs", "outputs")}}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ClientError(f"{self._model} does not describe a model of an inference server") from None

    def config(self) -> dict[str, Any] | None:
        try:
            found = self._call(f"{self._model}/config")
        except ClientError:
            return None
        return found if isinstance(found, dict) else None

    def statistics(self) -> list[dict[str, Any]] | None:
        try:
            found: list[dict[str, Any]] = self._call(f"{self._model}/stats")["model_stats"]
        except (ClientError, KeyError, TypeError):
            return None
        return found

    def head(self) -> bytes:
        return b""

    def encode(self, request: BenchRequest) -> list[bytes]:
        if self._encoding is None:
            binary = self._settings.tensors == "binary"
            if self._settings.tensors == "auto":
                binary = _BINARY_EXTENSION in self.server().get("extensions", ())
            self._encoding = HttpEncoding(
                self._authority, self._settings.headers, binary and not self._settings.streaming,
                self._settings.streaming,
            )  # fmt: skip
        return self._encoding.encode(request)

    def probe(self, parts: list[bytes]) -> list[FoundOutput]:
        try:
            with socket.create_connection((self.host, self.port), _PROBE_TIMEOUT_S) as connection:
                connection.sendall((b"%d" % PLACEHOLDER_ID).join(parts))
                response = http.client.HTTPResponse(connection)
                response.begin()
                with contextlib.closing(response):
                    if self._settings.streaming and response.status == 200:
                        return _event_outputs(response)
                    body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{self._url}: the request has failed: {error or type(error).__name__}") from None
        except ValueError as error:
            raise ClientError(f"{self._url}: the response cannot be read: {error}") from None
        return _outputs(response, body)

    def register(self, name: str, key: str, byte_size: int) -> None:
        self._call(
            f"{self._url}/v2/systemsharedmemory/region/{name}/register",
            {"key": key, "offset": 0, "byte_size": byte_size},
        )

    def unregister(self, name: str) -> None:
        self._call(f"{self._url}/v2/systemsharedmemory/region/{name}/unregister", {})

    def load(self, config: dict[str, Any] | None) -> None:
        body = {} if config is None else {"parameters": {"config": json.dumps(config)}}
        name = urllib.parse.quote(self._settings.model, safe="")
        self._call(f"{self._url}/v2/repository/models/{name}/load", body)

    def close(self) -> None:
        """See `BenchTarget`. Each call has a connection of its own."""

    def _call(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        return call(url, body, self._settings.headers)


def _tensors(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the metadata of a model says about its inputs or outputs. Raises what it lacks."""
    return [
        {"name": each["name"], "datatype": each["datatype"], "shape": [int(dim) for dim in each["shape"]]}
        for each in given
    ]


def _outputs(response: http.client.HTTPResponse, body: bytes) -> list[FoundOutput]:
    try:
        length = int(response.getheader("Inference-Header-Content-Length") or len(body))
        document = json.loads(body[:length])
    except ValueError:
        raise ClientError(
            f"the response {response.status} is not JSON of an inference server: {body[:200]!r}"
        ) from None
    if response.status != 200:
        text = document.get("error", document) if isinstance(document, dict) else document
        raise ClientError(f"the server returned {response.status}: {text}")
    try:
        return [
            FoundOutput(
                each["name"], each["datatype"], list(each["shape"]), each.get("parameters", {}).get("binary_data_size")
            )
            for each in document["outputs"]
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ClientError(f"the response does not come from an inference server: {error!r} is missing") from None


def _event_outputs(response: http.client.HTTPResponse) -> list[FoundOutput]:
    """Return the outputs of the first event, which has only their names. Raises `ClientError` and ValueError."""
    for line in response:
        if line.startswith(b"data: "):
            event = json.loads(line[6:])
            if not isinstance(event, dict):
                raise ValueError("an event is no JSON object")
            if "error" in event:
                raise ClientError(str(event["error"]))
            return [FoundOutput(name, "", []) for name in event if name not in ("model_name", "model_version")]
    return []


def wrong_response(outputs: Sequence[FoundOutput], metadata: Mapping[str, Any]) -> str:
    """Return what is wrong with the outputs of a response, or nothing.

    Outputs without a datatype are known by their names alone. A server that describes no outputs may send any.
    """
    known = {each["name"]: each for each in metadata["outputs"]}
    if not known:
        return ""
    if not outputs:
        return "it has no outputs"
    for output in outputs:
        expected = known.get(output.name)
        if expected is None:
            return f"it has an output '{output.name}', and the model has {', '.join(known)}"
        if not output.datatype:
            continue
        if output.datatype != expected["datatype"]:
            return f"output '{output.name}' is {output.datatype}, and not {expected['datatype']}"
        dims = [int(dim) for dim in expected["shape"]]
        # Triton's FIL backend, and ours, leave dimensions of 1 out of what a row has.
        without_ones = [*dims[:1], *(dim for dim in dims[1:] if dim != 1)]
        if not (_fits(output.shape, dims) or _fits(output.shape, without_ones)):
            return f"output '{output.name}' has shape {output.shape}, and not {dims}, where -1 is any size"
        row = DATATYPES.get(output.datatype)
        if row and row.byte_size and output.byte_size is not None:
            size = element_count(output.shape) * row.byte_size
            if output.byte_size != size:
                return f"output '{output.name}' has {output.byte_size} bytes, and its shape {output.shape} takes {size}"
    return ""


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(dims) == len(shape) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))
