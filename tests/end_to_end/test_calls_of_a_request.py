"""How many Python functions a small request calls until it is sent to its worker, and how deep the stack is then.

A function call costs little in a benchmark loop and much in a server, where the processor's caches hold other things
too (bench/README.md). So a call that is added to this path is seen in requests per second. `sys.setprofile` counts the
calls in a real server, for a request that is equal to earlier ones, from its first byte until the kernel writes it to
the worker's socket. The test does not depend on timing: other callbacks of the event loop can only add calls, so the
smallest of several counts is that of the request alone.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from backends.transport.channel import LoopChannel
from bench.load import CLIENT_PREFACE, SETTINGS, WINDOW_UPDATE, GrpcLoadClient, HttpLoadClient, frame
from bench.models import write_python_models
from kernel.embedding import EmbeddedServer
from kernel.loop.iteration_end import IterationEnd
from protocols.grpc.h2.transport import ServerConnection
from protocols.http.fast.connection import FastConnection
from tests.end_to_end.call_limits import MOST_CALLS, MOST_DEPTH

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

pytestmark = pytest.mark.slow_loop("a profile function slows the server's thread down")

ROOT = Path(__file__).parents[2]
TESTS = str(ROOT / "tests")


#: The tensors of a request in shared memory.
SHARED_BYTE_SIZE = 1 << 16

#: Requests before those that count. The first ones are parsed and checked.
WARM_UP, COUNTED = 20, 5

STARTS = {FastConnection.data_received.__code__, ServerConnection.buffer_updated.__code__}
#: The callbacks of the event loop that lead to the channel: a batch is made at the end of an iteration.
BEGINS = STARTS | {IterationEnd._end.__code__}
GIVEN_TO_CHANNEL = LoopChannel.send.__code__


class CallPath(msgspec.Struct):
    """What one request called: functions in order, and those on the stack when its message was given to the channel."""

    calls: list[str] = []
    stack: list[str] = []


class CallRecorder:
    """A profile function (`sys.setprofile`) that records the path of each request to its worker."""

    def __init__(self) -> None:
        self.paths: list[CallPath] = []
        self._path: CallPath | None = None

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            if frame.f_code in STARTS:
                self._path = CallPath()
            # The tests' own watch over slow callbacks is no part of the path.
            if self._path is not None and not frame.f_code.co_filename.startswith(TESTS):
                self._path.calls.append(name_of(frame.f_code))
                if frame.f_code is GIVEN_TO_CHANNEL:
                    self._path.stack = stack_of(frame)
        elif (
            event == "c_call"
            and self._path is not None
            and arg.__name__ == "send"
            and isinstance(arg.__self__, socket.socket)
        ):
            self.paths.append(self._path)
            self._path = None


def name_of(code: CodeType) -> str:
    path = Path(code.co_filename)
    return f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}:{code.co_qualname}"


def stack_of(frame: FrameType | None) -> list[str]:
    """Return the functions from the callback of the event loop down to `frame`."""
    names: list[str] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(TESTS):
            names.insert(0, name_of(frame.f_code))
        if frame.f_code in BEGINS:
            return names
        frame = frame.f_back
    return names


class GrpcCoreClient(GrpcLoadClient):
    """Sends the frames that clients of gRPC core (C++, Python) send: WINDOW_UPDATE behind HEADERS, and behind DATA."""

    def __init__(self) -> None:
        super().__init__()
        self.pending = bytearray(CLIENT_PREFACE + frame(SETTINGS, 0, 0, b""))  # a window that can still be enlarged

    def request(self, model: str) -> bytes:
        request = super().request(model)
        headers_end = 9 + int.from_bytes(request[:3])
        headers, data = request[:headers_end], request[headers_end:]
        stream = int.from_bytes(request[5:9])
        updates = [frame(WINDOW_UPDATE, 0, number, struct.pack(">I", 5)) for number in (stream, 0)]
        return headers + updates[0] + data + updates[1]


class SharedMemoryClient(HttpLoadClient):
    """Sends a tensor in a region, and has another one written to a second region."""

    def request(self, model: str) -> bytes:
        size = {"shared_memory_byte_size": SHARED_BYTE_SIZE}
        tensor = {"name": "INPUT0", "shape": [1, SHARED_BYTE_SIZE // 4], "datatype": "FP32"}
        body = {
            "inputs": [tensor | {"parameters": {"shared_memory_region": "in", **size}}],
            "outputs": [{"name": "OUTPUT0", "parameters": {"shared_memory_region": "out", **size}}],
        }
        return _post("/v2/models/identity/infer", msgspec.json.encode(body))


def _post(path: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def register_regions(port: int) -> None:
    """Register two regions, whose names are removed at once: the server keeps their memory."""
    for name in ("in", "out"):
        file = Path(f"/dev/shm/naiad_calls_{name}_{os.getpid()}")
        file.write_bytes(bytes(SHARED_BYTE_SIZE))
        try:
            settings = {"key": f"/{file.name}", "offset": 0, "byte_size": SHARED_BYTE_SIZE}
            message = _post(f"/v2/systemsharedmemory/region/{name}/register", msgspec.json.encode(settings))
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(message)
                assert b" 200 " in connection.recv(1 << 16)
        finally:
            file.unlink()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, CallPath]]:
    """The path of a warm request over each protocol."""
    models = tmp_path_factory.mktemp("models")
    write_python_models(models)
    recorder = CallRecorder()
    threading.setprofile(recorder)  # for the thread of the server
    patch = pytest.MonkeyPatch()
    patch.setattr("kernel.serving.instances.PLANNED_EXECUTION_NS", 10**12)  # on a busy machine the model may be slow
    try:
        with EmbeddedServer(
            models, http_port=0, grpc_port=0, model_control_mode="explicit", load_model=["add_sub", "identity"]
        ) as server:
            register_regions(server.ports["http"])
            yield {
                "http": shortest_path(recorder, HttpLoadClient(), server.ports["http"]),
                "grpc": shortest_path(recorder, GrpcCoreClient(), server.ports["grpc"]),
                "shared": shortest_path(recorder, SharedMemoryClient(), server.ports["http"]),
            }
    finally:
        patch.undo()
        threading.setprofile(None)


def shortest_path(recorder: CallRecorder, client: HttpLoadClient | GrpcLoadClient, port: int) -> CallPath:
    recorder.paths.clear()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for _ in range(WARM_UP + COUNTED):
            connection.sendall(client.pending)
            client.pending.clear()
            connection.sendall(client.request("add_sub"))
            while not client.feed(connection.recv(1 << 16)):
                pass
    assert len(recorder.paths) >= WARM_UP + COUNTED
    return min(recorder.paths[-COUNTED:], key=lambda path: len(path.calls))


def listed(names: list[str]) -> str:
    return "\n".join(f"{number:3} {name}" for number, name in enumerate(names, 1))


@pytest.mark.parametrize("protocol", sorted(MOST_CALLS))
def test_a_warm_request_calls_no_more_functions_than_before(paths: dict[str, CallPath], protocol: str) -> None:
    calls, most = paths[protocol].calls, MOST_CALLS[protocol]
    assert len(calls) <= most, f"{len(calls)} calls, the limit is {most}:\n{listed(calls)}"


@pytest.mark.parametrize("protocol", sorted(MOST_CALLS))
def test_a_warm_request_is_sent_with_no_deeper_stack_than_before(paths: dict[str, CallPath], protocol: str) -> None:
    stack, most = paths[protocol].stack, MOST_DEPTH[protocol]
    assert stack, "the request was never given to the worker's channel"
    assert len(stack) <= most, f"{len(stack)} functions deep, the limit is {most}:\n{listed(stack)}"
