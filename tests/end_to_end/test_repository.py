"""Models are loaded as their configuration, the command line and load requests say, by real workers."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerFailed, ServerProcess, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

TENSORS = """
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

#: Answers how many requests the instance had before, its process and its CPUs.
COUNTER = """
import os

class TritonPythonModel:
    seen = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            if pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0] == 13:
                raise ValueError("thirteen")
            found = [self.seen, os.getpid(), *sorted(os.sched_getaffinity(0))]
            self.seen += 1
            output = pb_utils.Tensor("OUT", np.array([found], np.int32))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
"""

WARMUP = """
model_warmup [{ name: "w" batch_size: 2 count: 3 inputs { key: "IN" value {
    data_type: TYPE_INT32 dims: [1] %s } } }]
"""


def request(value: int) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [value]}]}


class Client:
    """Calls a server, one connection a call."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.http_port, timeout=60)
        connection.request("POST", path, json.dumps(body if body is not None else {}))
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        return reply.status, json.loads(text) if text else None

    def infer(self, model: str, value: int = 0) -> list[int]:
        status, reply = self.post(f"/v2/models/{model}/infer", request(value))
        assert status == 200, reply
        found: list[int] = reply["outputs"][0]["data"]
        return found

    def load(self, model: str, parameters: dict[str, str] | None = None) -> str:
        """Load a model; returns the error, empty where there is none."""
        status, reply = self.post(f"/v2/repository/models/{model}/load", {"parameters": parameters or {}})
        return "" if status == 200 else reply["error"]


def test_a_model_is_warm_and_on_its_cpus_before_it_answers(write_model: WriteModel) -> None:
    cpu = min(os.sched_getaffinity(0))
    group = 'instance_group [{ kind: KIND_CPU host_policy: "one" }]'
    repository = write_model("warm", TENSORS + group + WARMUP % "zero_data: true", COUNTER)
    write_model("cold", TENSORS + WARMUP % 'input_data_file: "raw"', COUNTER)
    (repository / "cold" / "warmup").mkdir()
    (repository / "cold" / "warmup" / "raw").write_bytes(bytes([13, 0, 0, 0]))
    flags = ("--model-control-mode=explicit", "--load-model=warm", f"--host-policy=one,cpu-cores={cpu}-{cpu}")
    with ServerProcess(repository, *flags) as server:
        client = Client(server)
        seen, _, *cpus = client.infer("warm")
        assert (seen, cpus) == (6, [cpu])
        assert client.load("cold").startswith(
            "load failed for model 'cold': version 1 is at UNAVAILABLE state: Invalid argument: failed to run warmup "
            "sample 'w': Failed to process the request(s) for model 'cold_0', message: ValueError: thirteen"
        )


def test_a_model_sent_as_files_survives_its_worker_and_leaves_nothing(
    write_model: WriteModel, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = write_model("kept", TENSORS, COUNTER)
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    tensor = {"data_type": "TYPE_INT32", "dims": [-1]}
    config = {"max_batch_size": 4, "input": [{"name": "IN", **tensor}], "output": [{"name": "OUT", **tensor}]}
    source = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n" + COUNTER
    files = {"config": json.dumps(config), "file:3/model.py": base64.b64encode(source.encode()).decode()}
    with ServerProcess(repository, "--model-control-mode=explicit") as server:
        client = Client(server)
        assert client.load("sent", files) == ""
        _, pid, *_ = client.infer("sent")
        assert len(list(temporary.glob("naiad-model-*"))) == 1
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: client.post("/v2/models/sent/versions/3/infer", request(0))[0] == 200)
        assert client.infer("sent")[1] != pid, "the new worker has read the same files"
        assert client.post("/v2/repository/models/sent/unload")[0] == 200
        wait_for(lambda: not list(temporary.glob("naiad-model-*")))


def test_a_model_that_loads_for_ever_is_ended_with_a_reason(write_model: WriteModel) -> None:
    hanging = (
        "class TritonPythonModel:\n    def initialize(self, args):\n        import time\n        time.sleep(600)\n"
    )
    repository = write_model("hangs", TENSORS, hanging)
    with ServerProcess(repository, "--model-control-mode=explicit", "--model-load-timeout-secs=1") as server:
        assert Client(server).load("hangs") == (
            "load failed for model 'hangs': version 1 is at UNAVAILABLE state: Internal: the model was still loading "
            "after 1 s (--model-load-timeout-secs), and its worker was killed;\n"
        )


def test_without_its_repository_a_server_that_is_not_to_exit_says_that_it_is_not_live(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    with ServerProcess(absent, "--exit-on-error=false", "--strict-readiness=false") as server:
        assert server.get("/v2/health/live")[0] == 400
        assert server.get("/v2/health/ready")[0] == 400
        assert json.loads(server.get("/v2")[1])["name"] == "triton"
        server.wait_for_log(f"creating server: Internal - failed to read model repository '{absent}'")


OUT_OF_RANGE = TENSORS.replace("TYPE_INT32", "99999999999999999999", 1)


def test_a_model_whose_configuration_cannot_be_parsed_ends_neither_the_start_nor_the_polls(
    write_model: WriteModel,
) -> None:
    repository = write_model("good", TENSORS, COUNTER)
    write_model("bad", OUT_OF_RANGE, COUNTER)
    os.makedirs(os.fsencode(repository) + b"/name\xff/1")
    flags = ["--exit-on-error=false", "--model-control-mode=poll", "--repository-poll-secs=1"]
    with ServerProcess(repository, *flags) as server:
        client = Client(server)
        client.infer("good")
        _, index = client.post("/v2/repository/index")
        assert {item["name"]: item["state"] for item in index} == {"good": "READY", "bad": "UNAVAILABLE"}
        write_model("new", TENSORS, COUNTER)
        wait_for(lambda: client.post("/v2/models/new/infer", request(0))[0] == 200)
        (repository / "bad" / "config.pbtxt").write_text(f'backend: "python"\n{TENSORS}')
        wait_for(lambda: client.post("/v2/models/bad/infer", request(0))[0] == 200)


def test_a_fifo_as_configuration_or_log_holds_neither_the_server_nor_its_end(
    write_model: WriteModel, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    repository = write_model("good", TENSORS, COUNTER)
    write_model("bad", TENSORS, COUNTER)
    (repository / "bad" / "config.pbtxt").unlink()
    os.mkfifo(repository / "bad" / "config.pbtxt")
    flags = ["--exit-on-error=false", "--model-control-mode=poll", "--repository-poll-secs=1"]
    with ServerProcess(repository, *flags) as server:
        client = Client(server)
        client.infer("good")
        write_model("new", TENSORS, COUNTER)
        wait_for(lambda: client.post("/v2/models/new/infer", request(0))[0] == 200)
        server.wait_for_log("it is a FIFO, not a regular file")
        os.kill(server.pid, signal.SIGTERM)
        assert server.wait() == 0
    log = tmp_path_factory.mktemp("logs") / "log"
    os.mkfifo(log)
    with pytest.raises(ServerFailed, match="it is a FIFO that no process reads"):
        ServerProcess(repository, f"--log-file={log}").start()
