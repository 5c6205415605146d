"""Sends steps to a server and reads its answers, over `http.client` and grpcio."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.oracle.responses import StepResponse, binary_text, renamed
from bench.oracle.steps import KEY

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.oracle.steps import Document, Step

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_TIMEOUT_S = 15
_SHARED_MEMORY = Path("/dev/shm")
#: What `KEY` is on this machine, so that runs at the same time leave each other's regions alone.
_OWN_KEY = f"{KEY}_{os.getpid()}"


class AskedServer:
    """One server under comparison; close it with `with`."""

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
        """Send one step; an answer that cannot be read has the status `broken`."""
        answer = self._ask(renamed(step.args, KEY, _OWN_KEY), step.kind)
        return StepResponse(answer.status, renamed(answer.body, _OWN_KEY, KEY), renamed(answer.error, _OWN_KEY, KEY))

    def _ask(self, args: Document, kind: str) -> StepResponse:
        kinds: dict[str, Callable[..., StepResponse]] = {
            "http": self._http,
            "chunked": self._chunked,
            "rpc": self._rpc,
            "stream": self._stream,
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
        reply = call(_message(f"{name}Request", request, raw), timeout=timeout, metadata=_pairs(metadata))
        return StepResponse("grpc OK", _document(reply))

    def _stream(
        self, requests: list[Document], raws: list[list[bytes]], metadata: dict[str, str] | None = None
    ) -> StepResponse:
        messages = [_message("ModelInferRequest", request, raw) for request, raw in zip(requests, raws, strict=True)]
        replies: list[Document] = []
        status, details = "OK", None
        try:
            answers = self._stub.ModelStreamInfer(iter(messages), timeout=_TIMEOUT_S, metadata=_pairs(metadata))
            replies += [_document(reply) for reply in answers]
        except grpc.RpcError as error:
            status, details = error.code().name, error.details()
        errors = [reply.pop("error_message") for reply in replies if reply.get("error_message")]
        texts = [*errors, details] if details is not None else errors
        return StepResponse(f"grpc {status}", replies, "\n".join(texts) if texts else None)


def _read(reply: http.client.HTTPResponse) -> StepResponse:
    content = reply.read()
    encoding = reply.getheader("Content-Encoding")
    told: dict[str, Any] = {"content-type": (reply.getheader("Content-Type") or "").split(";")[0]}
    if encoding is not None:
        told["content-encoding"] = encoding
        content = gzip.decompress(content) if encoding == "gzip" else zlib.decompress(content)
    if reply.getheader("Accept-Encoding") is not None:
        told["accept-encoding"] = reply.getheader("Accept-Encoding")
    error = None
    length = reply.getheader("Inference-Header-Content-Length")
    if length is not None:
        told["json"] = json.loads(content[: int(length)].decode("utf-8", "replace"))
        told["binary"] = binary_text(content[int(length) :])
    elif told["content-type"] == "text/event-stream":
        told["events"] = _events(content.decode())
    elif content[:1] in (b"{", b"["):
        told["json"] = json.loads(content.decode("utf-8", "replace"))
        if isinstance(told["json"], dict) and set(told["json"]) == {"error"}:
            error = told["json"].pop("error")
    else:
        told["text"] = content.decode("utf-8", "replace")
    return StepResponse(f"http {reply.status}", told, error)


def _events(text: str) -> list[Any]:
    """Return the data of server-sent events."""
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]


def _message(kind: str, request: Document, raw: list[bytes]) -> Any:
    message = json_format.ParseDict(request, getattr(service_pb2, kind)())
    if raw:
        message.raw_input_contents.extend(raw)
    return message


def _document(reply: Any) -> Document:
    found: Document = json_format.MessageToDict(reply, preserving_proto_field_name=True)
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
