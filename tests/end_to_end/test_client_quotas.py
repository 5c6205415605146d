"""Quotas of clients that a header names, at each door of a real server, and responses in the order of requests."""

from __future__ import annotations

import gzip
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
max_batch_size: 1
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
dynamic_batching { }
parameters { key: "naiad.fair_by" value { string_value: "header:X-Tenant" } }
parameters { key: "naiad.quota" value { string_value: "1" } }
"""

#: Waits for the end of the file `gate` where it is given 7.
GATED = """
import pathlib, time

class TritonPythonModel:
    def initialize(self, args):
        self.gate = pathlib.Path(args["model_repository"]) / "gate"

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if value[0, 0] == 7:
                (self.gate.parent / "waits").touch()
                while not self.gate.exists():
                    time.sleep(0.005)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""

PATH = "/v2/models/gated/"


def body(value: int) -> bytes:
    return json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [value]}]}).encode()


def post(server: ServerProcess, path: str, octets: object, tenant: str, **headers: str) -> tuple[int, str | None]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)) as connection:
        connection.request("POST", PATH + path, octets, {"x-TENANT": tenant, **headers})  # type: ignore[arg-type]
        response = connection.getresponse()
        response.read()
        return response.status, response.headers["Retry-After"]


def fast(server: ServerProcess, tenant: str) -> tuple[int, str | None]:
    return post(server, "infer", body(1), tenant)


def compressed(server: ServerProcess, tenant: str) -> tuple[int, str | None]:
    return post(server, "infer", gzip.compress(body(1)), tenant, **{"Content-Encoding": "gzip"})


def generated(server: ServerProcess, tenant: str) -> tuple[int, str | None]:
    return post(server, "generate", b'{"IN": [1]}', tenant)


def grpc_input() -> grpc_client.InferInput:
    tensor = grpc_client.InferInput("IN", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[1]], np.int32))
    return tensor


def unary(server: ServerProcess, tenant: str) -> tuple[int, str | None]:
    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        try:
            client.infer("gated", [grpc_input()], headers={"x-tenant": tenant}, client_timeout=60)
        except InferenceServerException as error:
            return {str(grpc.StatusCode.RESOURCE_EXHAUSTED): 429}.get(error.status(), 0), "1"
        return 200, None


def streamed(server: ServerProcess, tenant: str) -> tuple[int, str | None]:
    found: list[InferenceServerException | None] = []
    done = threading.Event()

    def receive(result: object, error: InferenceServerException | None) -> None:
        found.append(error)
        done.set()

    with grpc_client.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(receive, headers={"x-tenant": tenant})
        client.async_stream_infer("gated", [grpc_input()])
        assert done.wait(50)
        client.stop_stream()
    if found[0] is None:
        return 200, None
    assert "this client already has 1 requests queued or in flight, which is its quota" in str(found[0])
    return 429, "1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models") / "gated"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'backend: "python"\n{CONFIG}')
    (folder / "1" / "model.py").write_text(f"import triton_python_backend_utils as pb_utils\n{GATED}")
    with ServerProcess(folder.parent) as server:
        yield server


@pytest.mark.parametrize("send", [fast, compressed, generated, unary, streamed])
def test_a_client_above_its_quota_is_refused_at_each_door(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory, send: Callable[..., tuple[int, str | None]]
) -> None:
    folder = next(tmp_path_factory.getbasetemp().glob("models*/gated"))
    for name in ("gate", "waits"):
        (folder / name).unlink(missing_ok=True)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(post, server, "infer", body(7), "a")
        try:
            wait_for((folder / "waits").exists)
            refused = [send(server, "a"), send(server, "a")]
            other = threads.submit(send, server, "b")
        finally:
            (folder / "gate").touch()
        assert refused == [(429, "1")] * 2
        assert first.result() == other.result() == (200, None)
    assert send(server, "a") == (200, None)


ORDERED = """
max_batch_size: 1
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
model_transaction_policy { decoupled: true }
instance_group [{ count: 2 kind: KIND_CPU }]
dynamic_batching { preserve_ordering: true }
"""

#: The response to 0 waits until another instance has sent all responses to 1.
OVERTAKING = """
import pathlib, time

class TritonPythonModel:
    def initialize(self, args):
        self.gate = pathlib.Path(args["model_repository"]) / "gate"

    def execute(self, requests):
        [request] = requests
        value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
        while value[0, 0] == 0 and not self.gate.exists():
            time.sleep(0.005)
        sender = request.get_response_sender()
        for _ in range(2):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if value[0, 0] == 1:
            self.gate.touch()
"""


def test_responses_of_two_instances_keep_the_order_of_the_requests(write_model: WriteModel) -> None:
    found: list[int] = []
    done = threading.Event()

    def receive(result: grpc_client.InferResult, error: InferenceServerException | None) -> None:
        assert error is None
        found.append(int(result.as_numpy("OUT")[0, 0]))
        if len(found) == 4:
            done.set()

    with (
        ServerProcess(write_model("ordered", ORDERED, OVERTAKING)) as server,
        grpc_client.InferenceServerClient(server.grpc_url) as client,
    ):
        client.start_stream(receive)
        for value in (0, 1):
            tensor = grpc_input()
            tensor.set_data_from_numpy(np.array([[value]], np.int32))
            client.async_stream_infer("ordered", [tensor])
        assert done.wait(50)
        client.stop_stream()
    assert found == [0, 0, 1, 1]
