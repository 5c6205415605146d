"""Our server and a real Triton over one folder of models, with the flags that the cases need, and what asks them.

Each serves its own copy of the models, because Python writes compiled files next to a model, which changes the model.
Steps are sent, and responses read, with `http.client` and grpcio: an oracle shares no code with what it judges.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import shutil
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.machine import stat_fields
from bench.oracle.responses import StepResponse, binary_text, renamed
from bench.oracle.steps import KEY
from bench.server import ServerProcess, free_ports, wait_for
from bench.triton import triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.oracle.steps import Document, Step

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

_TIMEOUT_S = 60

#: Responses within this time of one another came together.
SAME_TIME_S = 0.05

_SHARED_MEMORY = Path("/dev/shm")

#: Stands for `KEY` on this machine, so that runs at the same time do not share regions.
_OWN_KEY = f"{KEY}_{os.getpid()}"


class AskedServer:
    """One server under comparison, with its connections. Use it in a `with` block."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._http_port = http_port
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options=_UNLIMITED)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> AskedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        _remove_region(_OWN_KEY)  # a step that failed may have left it

    def ask(self, step: Step) -> StepResponse:
        """Send one step. A response that cannot be read has the status `broken`."""
        found = self._ask(renamed(step.args, KEY, _OWN_KEY), step.kind)
        return StepResponse(found.status, renamed(found.body, _OWN_KEY, KEY), renamed(found.error, _OWN_KEY, KEY))

    def _ask(self, args: Document, kind: str) -> StepResponse:
        kinds: dict[str, Callable[..., StepResponse]] = {
            "http": self._http,
            "chunked": self._chunked,
            "rpc": self._rpc,
            "stream": self._stream,
            "racing": self._racing,
            "region": _make_region,
            "read_region": _read_region,
            "remove_region": _remove_region,
        }
        try:
            return kinds[kind](**args)
        except grpc.RpcError as error:
            return StepResponse(f"grpc {error.code().name}", None, error.details())
        except (OSError, http.client.HTTPException, TimeoutError) as error:
            return StepResponse("broken", None, f"{type(error).__name__}: {error}")

    def _http(self, method: str, path: str, body: Any, headers: dict[str, str]) -> StepResponse:
        content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        with contextlib.closing(self._connection()) as connection:
            connection.request(method, path, body=content, headers=headers)
            return _read(connection.getresponse())

    def _chunked(self, path: str, chunks: list[bytes], headers: dict[str, str]) -> StepResponse:
        with contextlib.closing(self._connection()) as connection:
            connection.request("POST", path, body=iter(chunks), headers=headers, encode_chunked=True)
            return _read(connection.getresponse())

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=_TIMEOUT_S)

    def _rpc(
        self, name: str, request: Document, raw: list[bytes], timeout: float, metadata: dict[str, str] | None = None
    ) -> StepResponse:
        call = getattr(self._stub, name)
        response = call(_message(f"{name}Request", request, raw), timeout=timeout, metadata=_pairs(metadata))
        return StepResponse("grpc OK", _document(response))

    def _stream(
        self, requests: list[Document], raws: list[list[bytes]], metadata: dict[str, str] | None = None
    ) -> StepResponse:
        messages = [_message("ModelInferRequest", request, raw) for request, raw in zip(requests, raws, strict=True)]
        found: list[Document] = []
        status, details = "OK", None
        try:
            responses = self._stub.ModelStreamInfer(iter(messages), timeout=_TIMEOUT_S, metadata=_pairs(metadata))
            found += [_document(response) for response in responses]
        except grpc.RpcError as error:
            status, details = error.code().name, error.details()
        errors = [each.pop("error_message") for each in found if each.get("error_message")]
        texts = [*errors, details] if details is not None else errors
        return StepResponse(f"grpc {status}", found, "\n".join(texts) if texts else None)

    def _racing(self, steps: list[Document], order: bool) -> StepResponse:
        began = time.monotonic()

        def ask(step: Document) -> tuple[StepResponse, float]:
            time.sleep(max(0.0, began + step["delay_ms"] / 1000 - time.monotonic()))
            response = self._ask(step["args"], step["kind"])
            return response, time.monotonic()

        with ThreadPoolExecutor(len(steps)) as pool:
            found = list(pool.map(ask, steps))
        body: Document = {"responses": [asdict(response) for response, _ in found]}
        if order:
            body["order"] = _groups([ended for _, ended in found])
        status = "broken" if any(response.status == "broken" for response, _ in found) else "together"
        return StepResponse(status, body)


def _groups(times: list[float]) -> list[list[int]]:
    """Return the positions in the order of their times; those that follow soon after another are in its group."""
    groups: list[list[int]] = []
    last = 0.0
    for at, position in sorted((at, position) for position, at in enumerate(times)):
        if not groups or at - last > SAME_TIME_S:
            groups.append([])
        groups[-1].append(position)
        last = at
    return [sorted(group) for group in groups]


def _read(response: http.client.HTTPResponse) -> StepResponse:
    content = response.read()
    encoding = response.getheader("Content-Encoding")
    body: dict[str, Any] = {"content-type": (response.getheader("Content-Type") or "").split(";")[0]}
    if encoding is not None:
        body["content-encoding"] = encoding
        content = gzip.decompress(content) if encoding == "gzip" else zlib.decompress(content)
    if response.getheader("Accept-Encoding") is not None:
        body["accept-encoding"] = response.getheader("Accept-Encoding")
    error = None
    length = response.getheader("Inference-Header-Content-Length")
    if length is not None:
        body["json"] = json.loads(content[: int(length)].decode("utf-8", "replace"))
        body["binary"] = binary_text(content[int(length) :])
    elif body["content-type"] == "text/event-stream":
        body["events"] = _events(content.decode())
    elif content[:1] in (b"{", b"["):
        try:
            body["json"] = json.loads(content.decode("utf-8", "replace"))
        except json.JSONDecodeError:  # Triton sends two bodies where it responds twice
            return StepResponse(f"http {response.status}", body | {"text": content.decode("utf-8", "replace")})
        if isinstance(body["json"], dict) and set(body["json"]) == {"error"}:
            error = body["json"].pop("error")
    else:
        body["text"] = content.decode("utf-8", "replace")
    return StepResponse(f"http {response.status}", body, error)


def _events(text: str) -> list[Any]:
    """Return the data of server-sent events."""
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]


def _message(kind: str, request: Document, raw: list[bytes]) -> Any:
    message = json_format.ParseDict(request, getattr(service_pb2, kind)())
    if raw:
        message.raw_input_contents.extend(raw)
    return message


def _document(response: Any) -> Document:
    found: Document = json_format.MessageToDict(response, preserving_proto_field_name=True)
    return found


def _pairs(metadata: dict[str, str] | None) -> list[tuple[str, str]] | None:
    return None if metadata is None else list(metadata.items())


def _make_region(key: str, content: bytes) -> StepResponse:
    (_SHARED_MEMORY / key).write_bytes(content)
    return StepResponse("done")


def _read_region(key: str, offset: int, byte_size: int) -> StepResponse:
    content = (_SHARED_MEMORY / key).read_bytes()[offset : offset + byte_size]
    return StepResponse("done", {"binary": binary_text(content)})


def _remove_region(key: str) -> StepResponse:
    (_SHARED_MEMORY / key).unlink(missing_ok=True)
    return StepResponse("done")


ROOT = Path(__file__).parents[2]

#: A suite has cases, the models that they need, and the recorded responses to them.
SUITE = ROOT / "tests/conformance"

CASES = SUITE / "cases"

MODELS = SUITE / "models"

RECORDED = SUITE / "recorded"

#: Models whose names begin with this are loaded by cases, not at the start.
LATER = "late_"

#: Headers that are forwarded to models, and a category of the API that needs a header: no other case uses them.
FLAGS = (
    "--model-control-mode=explicit",
    "--http-header-forward-pattern=x-case-.*",
    "--grpc-header-forward-pattern=x-case-.*",
    "--http-restricted-api=logging:case-key=open",
    "--grpc-restricted-protocol=logging:case-key=open",
)


def flags(models: Path) -> list[str]:
    """Return the flags of both servers."""
    names = sorted(path.name for path in models.iterdir() if path.is_dir())
    return [*FLAGS, *(f"--load-model={name}" for name in names if not name.startswith(LATER))]


class Ours:
    """Our server, which runs while the `with` block lasts. Raises `bench.server.ServerFailed`."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._running = contextlib.ExitStack()
        self._server: AskedServer
        self.process: ServerProcess
        #: The path of its copy of the models.
        self.repository = ""

    def __enter__(self) -> Ours:
        with contextlib.ExitStack() as started:
            folder = started.enter_context(tempfile.TemporaryDirectory())
            copy = shutil.copytree(self._models, Path(folder, "models"))
            self.process = started.enter_context(ServerProcess(copy, *flags(copy)))
            self._server = started.enter_context(AskedServer(self.process.http_port, self.process.grpc_port))
            self.repository = str(copy)
            self._running = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def ask(self, step: Step) -> StepResponse:
        return self._server.ask(step)


class Triton:
    """A real Triton, which is started again if a request ends it. Raises `bench.triton.NotAvailable`."""

    def __init__(self, models: Path) -> None:
        self._models = models
        self._running = contextlib.ExitStack()
        self._server: AskedServer
        self._pid = 0
        #: The path of its copy of the models.
        self.repository = ""

    def __enter__(self) -> Triton:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def _start(self) -> None:
        folder = self._running.enter_context(tempfile.TemporaryDirectory())
        copy = shutil.copytree(self._models, Path(folder, "models"))
        http_port, grpc_port, metrics_port = free_ports(3)
        self._pid = self._running.enter_context(triton(copy, http_port, grpc_port, metrics_port, *flags(copy)))
        self._server = self._running.enter_context(AskedServer(http_port, grpc_port))
        self.repository = str(copy)

    def ask(self, step: Step) -> StepResponse:
        """Send one step. The status is `crashed` if it ends the server."""
        response = self._server.ask(step)
        if "tatistics" in str(step.args.get("name")) or str(step.args.get("path")).endswith("/stats"):
            response = self._settled(step, response)
        if (response.status == "broken" or response.status == "grpc UNAVAILABLE") and self._has_ended():
            self._running.close()
            self._start()
            return StepResponse("crashed")
        return response

    def _settled(self, step: Step, response: StepResponse) -> StepResponse:
        """Ask again until nothing changes: Triton counts a request some time after it has sent the response."""
        while True:
            time.sleep(0.1)
            again = self._server.ask(step)
            if again == response:
                return response
            response = again

    def _has_ended(self) -> bool:
        try:
            wait_for(lambda: stat_fields(self._pid)[:1] == ["Z"], 2)
        except TimeoutError:
            return False
        return True
