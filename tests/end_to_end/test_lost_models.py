"""While the only worker of a model is lost, whatever a client asks says so, and no request waits in vain."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel


grpcclient = pytest.importorskip("tritonclient.grpc")

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

#: Its next start waits while there is a file `wait`, and fails while there is a file `fail`.
MODEL = """
import os, time
FOLDER = os.path.dirname(__file__)

class TritonPythonModel:
    def initialize(self, args):
        while os.path.exists(FOLDER + "/wait"):
            time.sleep(0.01)
        if os.path.exists(FOLDER + "/fail"):
            raise RuntimeError("there is no luck")

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
            for r in requests
        ]
"""

ENSEMBLE = """
platform: "ensemble"
input [{ name: "A" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "B" data_type: TYPE_INT32 dims: [1] }]
ensemble_scheduling { step [{
    model_name: "echo" model_version: -1
    input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" }
}] }
"""


def infer(server: ServerProcess, value: int = 5, **parameters: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    inputs = [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}]
    body = {"inputs": inputs, "parameters": parameters}
    connection.request("POST", "/v2/models/echo/infer", json.dumps(body))
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text)


def told(server: ServerProcess) -> dict[str, Any]:
    """Return what the server says of the model and of the ensemble, by way of asking."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", "/v2/repository/index", "{}")
    index = {item["name"]: item for item in json.loads(connection.getresponse().read())}
    connection.close()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        ready = client.get_model_repository_index(as_json=True).get("models", [])
        assert {item["name"]: item["state"] for item in ready} == {k: v["state"] for k, v in index.items()}
        return {
            "index": {name: item["state"] for name, item in index.items()},
            "reason": index["echo"].get("reason", ""),
            "model": [server.get(f"/v2/models/{name}/ready")[0] == 200 for name in ("echo", "over")],
            "model over gRPC": [client.is_model_ready(name) for name in ("echo", "over")],
            "server": server.get("/v2/health/ready")[0] == 200,
            "server over gRPC": client.is_server_ready(),
            "live": server.get("/v2/health/live")[0] == 200,
        }


def all_say(ready: bool) -> dict[str, Any]:
    state = "READY" if ready else "UNAVAILABLE"
    return {
        "index": {"echo": state, "over": state},
        "model": [ready] * 2,
        "model over gRPC": [ready] * 2,
        "server": ready,
        "server over gRPC": ready,
        "live": True,
    }


def agreed(server: ServerProcess) -> tuple[dict[str, Any], str]:
    found = told(server)
    return found, found.pop("reason")


def test_index_and_readiness_agree_while_the_only_worker_starts_again_and_requests_wait_for_it(
    write_model: WriteModel,
) -> None:
    repository = write_model("echo", CONFIG, MODEL)
    (repository / "over" / "1").mkdir(parents=True)
    (repository / "over" / "config.pbtxt").write_text(ENSEMBLE)
    with ServerProcess(repository) as server, concurrent.futures.ThreadPoolExecutor() as threads:
        assert agreed(server) == (all_say(True), "")
        (repository / "echo/1/wait").touch()
        [worker] = server.workers("echo")
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: server.get("/v2/models/echo/ready")[0] != 200)
        found, reason = agreed(server)
        assert found == all_say(False)
        assert "was lost and is started again: killed by signal 9" in reason
        waiting = threads.submit(infer, server)
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            tensor = grpcclient.InferInput("IN", [1], "INT32")
            tensor.set_data_from_numpy(__import__("numpy").zeros(1, "int32"))
            with pytest.raises(Exception, match="Deadline Exceeded"):
                client.infer("echo", [tensor], client_timeout=0.2)
        status, body = infer(server, timeout=100_000)
        assert status == 503
        assert "which takes longer than the request's timeout of 100000 microseconds" in body["error"]
        assert not waiting.done()
        (repository / "echo/1/wait").unlink()
        status, body = waiting.result(50)
        assert (status, body["outputs"][0]["data"]) == (200, [5])
        assert agreed(server) == (all_say(True), "")


def test_requests_of_a_model_whose_worker_cannot_be_started_again_get_the_reason_at_once(
    write_model: WriteModel,
) -> None:
    repository = write_model("echo", CONFIG, MODEL)
    (repository / "over" / "1").mkdir(parents=True)
    (repository / "over" / "config.pbtxt").write_text(ENSEMBLE)
    with ServerProcess(repository) as server:
        (repository / "echo/1/fail").touch()
        [worker] = server.workers("echo")
        os.kill(worker, signal.SIGKILL)
        for _ in range(5):  # the first perhaps before the failed start, the others while the next one is a while off
            status, body = infer(server)
            assert status == 503
            assert body["error"].startswith("no instance of model 'echo' is alive: RuntimeError: there is no luck")
        found, reason = agreed(server)
        assert found == all_say(False)
        assert reason.startswith("instance 'echo_0' could not be started again: RuntimeError: there is no luck")
        (repository / "echo/1/fail").unlink()
        wait_for(lambda: server.get("/v2/health/ready")[0] == 200)
        assert agreed(server) == (all_say(True), "")
        assert infer(server)[0] == 200


def test_the_log_says_where_a_worker_was_when_it_crashed(write_model: WriteModel) -> None:
    with ServerProcess(write_model("echo", CONFIG, MODEL)) as server:
        [worker] = server.workers("echo")
        os.kill(worker, signal.SIGSEGV)
        wait_for(lambda: "echo: Fatal Python error: Segmentation fault" in server.log)
        wait_for(lambda: "the worker of model instance 'echo_0' was lost: killed by signal 11 (SIGSEGV)" in server.log)
        assert "(most recent call first)" in server.log
