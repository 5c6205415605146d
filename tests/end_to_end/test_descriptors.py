"""Clients take every file descriptor that they can get: others read why, workers are started again, nothing spins."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from bench.server import ServerProcess, wait_for
from kernel.machine import reserved_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.conftest import WriteModel

LIMIT = 256
TEXT = "the server has no file descriptor left; try again later"

CONFIG = """
input [{ name: "IN" data_type: TYPE_UINT8 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""
COUNT = """
class TritonPythonModel:
    def execute(self, requests):
        sizes = [pb_utils.get_input_tensor_by_name(each, "IN").as_numpy().size for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([n], np.int32))]) for n in sizes]
"""


def infer(connection: http.client.HTTPConnection, byte_size: int) -> tuple[int, Any]:
    """Send an input of `byte_size` bytes; returns the status, and the size that the model saw or the error."""
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [byte_size], "parameters": {"binary_data_size": byte_size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", "/v2/models/count/infer", head + bytes(byte_size), headers)
    response = connection.getresponse()
    found = json.loads(response.read())
    return response.status, found["outputs"][0]["data"][0] if response.status == 200 else found["error"]


@pytest.fixture
def server(write_model: WriteModel) -> Iterator[ServerProcess]:
    with ServerProcess(write_model("count", CONFIG, COUNT)) as server:
        yield server


@contextlib.contextmanager
def all_taken(port: int) -> Iterator[bytes]:
    """Open connections until one is refused, and keep them while the block runs; the value is what it has read."""
    with contextlib.ExitStack() as stack:
        for _ in range(LIMIT):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            if b" 200 " not in (received := sock.recv(4096)):
                yield received
                return
        raise AssertionError("no connection was refused")


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_clients_that_take_all_descriptors_leave_some_for_workers(server: ServerProcess) -> None:
    known = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    assert infer(known, 10) == (200, 10)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    with all_taken(server.http_port) as received:
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert json.loads(body) == {"error": TEXT}
        assert len(os.listdir(f"/proc/{server.pid}/fd")) <= LIMIT - reserved_count(LIMIT) + 2

        with grpc.insecure_channel(server.grpc_url) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=60)
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, TEXT)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.metrics_port, timeout=60)) as metrics:
            metrics.request("GET", "/metrics")
            assert metrics.getresponse().status == 503

        [worker] = server.workers("count")
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: "is ready again" in server.log)
        assert infer(known, 1_000_000) == (200, 1_000_000), "an arena needs a descriptor, too"

        before, start_s = processor_s(server.pid), time.monotonic()
        refused = socket.create_connection(("127.0.0.1", server.http_port), timeout=60)
        with refused:
            while refused.recv(4096):
                pass
        assert processor_s(server.pid) - before < (time.monotonic() - start_s) / 2, "it spins"
    server.wait_for_log("connections are refused")

    def admitted() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return server.get("/v2/health/live")[0] == 200
        return False

    wait_for(admitted)
    known.close()


def test_without_any_descriptor_a_request_is_refused_with_503_and_later_served(server: ServerProcess) -> None:
    known = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    assert infer(known, 10) == (200, 10)
    highest = max(int(fd) for fd in os.listdir(f"/proc/{server.pid}/fd"))
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    # No free number is below the limit, once the holes are taken.
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, hard))
    assert highest > 3
    assert infer(known, 1_000_000) == (503, TEXT), "the first large input needs an arena"
    known.request("POST", "/v2/repository/index")
    response = known.getresponse()
    assert (response.status, json.loads(response.read())) == (503, {"error": TEXT})
    body = json.dumps({"key": "/naiad_no_such_object", "offset": 0, "byte_size": 1})
    known.request("POST", "/v2/systemsharedmemory/region/r/register", body)
    response = known.getresponse()
    assert (response.status, json.loads(response.read())) == (503, {"error": TEXT})
    assert infer(known, 10) == (200, 10)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert infer(known, 1_000_000) == (200, 1_000_000)
    known.close()


def test_the_limit_is_raised_as_far_as_the_system_allows(write_model: WriteModel) -> None:
    repository = write_model("count", CONFIG, COUNT)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Lower than the highest, but enough for what earlier tests have left open in this process.
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, used + 100), hard))
    try:
        with ServerProcess(repository) as server:
            found, _ = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == min(hard, 1 << 20)
