"""Models with `async def execute` and a concurrency, in a whole server; and models that say whether they are ready."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

CONCURRENCY = 8

CONFIG = f"""
input [{{ name: "IN" data_type: TYPE_INT32 dims: [1] }}]
output [{{ name: "OUT" data_type: TYPE_INT32 dims: [1] }}]
instance_group [{{ kind: KIND_CPU count: 1 }}]
parameters {{ key: "naiad.concurrency" value {{ string_value: "{CONCURRENCY}" }} }}
"""

#: 0 waits until as many requests as the concurrency are there, and responds with the most that ever were; 1 waits for
#: the client to go, and leaves a file; 2 ends the worker; others respond at once.
MEETING = f"""
import asyncio, os

class TritonPythonModel:
    def initialize(self, args):
        self.count = self.most = 0
        self.met = asyncio.Event()

    async def execute(self, requests):
        self.count += len(requests)
        self.most = max(self.most, self.count)
        value = int(pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy()[0])
        open(os.path.join(pb_utils.get_model_dir(), f"begun {{value}} {{self.count}}"), "w").close()
        if value == 0:
            if self.count == {CONCURRENCY}:
                self.met.set()
            await self.met.wait()
            value = self.most
        elif value == 1:
            while not requests[0].is_cancelled():
                await asyncio.sleep(0.002)
            open(os.path.join(pb_utils.get_model_dir(), "cancelled"), "w").close()
        elif value == 2:
            os._exit(3)
        elif value == 3:
            await asyncio.sleep(3600)
        self.count -= len(requests)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))])]
"""


def infer(server: ServerProcess, value: int, model: str = "meeting") -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(server.url, timeout=60)
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}]})
    connection.request("POST", f"/v2/models/{model}/infer", body)
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, content


@pytest.mark.parametrize("flags", [(), ("--worker-shared-memory=false",)], ids=["shared memory", "copies"])
def test_as_many_requests_as_the_concurrency_are_in_execution_and_no_more(
    write_model: WriteModel, flags: tuple[str, ...]
) -> None:
    with (
        ServerProcess(write_model("meeting", CONFIG, MEETING), *flags) as server,
        ThreadPoolExecutor(4 * CONCURRENCY) as pool,
    ):
        responses = list(pool.map(lambda _: infer(server, 0), range(4 * CONCURRENCY)))
    assert {status for status, _ in responses} == {200}
    assert {content["outputs"][0]["data"][0] for _, content in responses} == {CONCURRENCY}


def test_a_model_sees_that_one_of_its_requests_is_cancelled(write_model: WriteModel) -> None:
    repository = write_model("meeting", CONFIG, MEETING)
    folder = repository / "meeting/1"
    with ServerProcess(repository) as server:
        body = json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]}).encode()
        with socket.create_connection(("127.0.0.1", server.http_port)) as client:
            client.sendall(
                b"POST /v2/models/meeting/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
            )
            client.sendall(body)
            wait_for(lambda: (folder / "begun 1 1").exists())
            assert infer(server, 5)[0] == 200, "it does not wait for the other"
            assert not (folder / "cancelled").exists()
        wait_for(lambda: (folder / "cancelled").exists())
        assert infer(server, 6)[0] == 200


def test_a_lost_worker_fails_what_it_was_executing_and_the_next_one_takes_the_rest(write_model: WriteModel) -> None:
    repository = write_model("meeting", CONFIG, MEETING)
    with ServerProcess(repository) as server, ThreadPoolExecutor(CONCURRENCY + 4) as pool:
        waiting = [pool.submit(infer, server, 3) for _ in range(CONCURRENCY - 1)]
        wait_for(lambda: (repository / f"meeting/1/begun 3 {CONCURRENCY - 1}").exists())
        ending = infer(server, 2)
        for status, content in [ending, *(each.result() for each in waiting)]:
            assert status == 503
            assert "was lost" in content["error"]
            assert "while it executed the request" in content["error"]
        assert infer(server, 7)[0] == 200, "a new worker"


# ---- is_ready -------------------------------------------------------------------------------

HEALTH = """
import os

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.int32))]) for _ in requests]

    def is_ready(self):
        return not os.path.exists(os.path.join(pb_utils.get_model_dir(), "ill"))
"""

HEALTH_CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU count: 2 }]
"""


def status_of(server: ServerProcess, path: str) -> int:
    connection = http.client.HTTPConnection(server.url, timeout=60)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_model_that_says_so_is_not_ready_but_executes(write_model: WriteModel) -> None:
    repository = write_model("health", HEALTH_CONFIG, HEALTH)
    with (
        ServerProcess(repository) as server,
        grpc.insecure_channel(server.grpc_url) as channel,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def seen() -> list[object]:
            return [
                status_of(server, "/v2/models/health/ready"),
                status_of(server, "/v2/health/ready"),
                stub.ModelReady(service_pb2.ModelReadyRequest(name="health")).ready,
                stub.ServerReady(service_pb2.ServerReadyRequest()).ready,
            ]

        assert seen() == [200, 200, True, True]
        (repository / "health/1/ill").touch()
        assert seen() == [400, 400, False, False]
        assert infer(server, 1, "health")[0] == 200
        assert status_of(server, "/v2/health/live") == 200
        (repository / "health/1/ill").unlink()
        assert seen() == [200, 200, True, True]
        for instance in ("health_0_0", "health_0_1"):
            text = f"Model '{instance}' is not ready (user-defined check failed)."
            server.wait_for_log(text)
            assert server.log.count(text) == 1
