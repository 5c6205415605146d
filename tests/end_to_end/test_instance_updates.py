"""Instances come and go under load, and no request is lost."""

from __future__ import annotations

import http.client
import json
import re
import threading
from typing import TYPE_CHECKING, Any

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU count: %d }]
"""

ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]) for values in inputs]
"""


class Clients:
    """Send numbered requests until told to stop, and note every answer that is not the number."""

    def __init__(self, server: ServerProcess, count: int) -> None:
        self.answered = 0
        self.wrong: list[Any] = []
        self._server = server
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.http_port, timeout=60)
        number = 0
        while not self._stop.is_set():
            number += 1
            tensor = {"name": "IN", "datatype": "INT32", "shape": [1], "data": [number]}
            connection.request("POST", "/v2/models/echo/infer", json.dumps({"inputs": [tensor]}))
            answer = json.loads(connection.getresponse().read())
            with self._lock:
                self.answered += 1
                if "outputs" not in answer or answer["outputs"][0]["data"] != [number]:
                    self.wrong.append(answer)
        connection.close()

    def some_more(self) -> None:
        """Wait until a good many requests more are answered."""
        before = self.answered
        wait_for(lambda: self.answered > before + 100)

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request hangs"


def post(server: ServerProcess, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", path, json.dumps(body or {}))
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, json.loads(text) if text else None


def configured_count(server: ServerProcess) -> int:
    _, text = server.get("/v2/models/echo/config")
    count: int = json.loads(text)["instance_group"][0]["count"]
    return count


def executed(server: ServerProcess) -> int:
    _, text = server.get("/v2/models/echo/stats")
    count: int = json.loads(text)["model_stats"][0]["execution_count"]
    return count


def test_instances_are_added_and_removed_under_load_without_a_lost_request(write_model: WriteModel) -> None:
    repository = write_model("echo", "", ECHO)
    file = repository / "echo" / "config.pbtxt"
    file.write_text(CONFIG % 1)
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=*") as server:
        (first,) = server.workers("echo")
        clients = Clients(server, 4)
        try:
            clients.some_more()
            file.write_text(CONFIG % 3)
            assert post(server, "/v2/repository/models/echo/load") == (200, None)
            assert configured_count(server) == len(server.workers("echo")) == 3
            clients.some_more()
            file.write_text(CONFIG % 1)
            assert post(server, "/v2/repository/models/echo/load") == (200, None)
            assert configured_count(server) == 1
            wait_for(lambda: len(server.workers("echo")) == 1)
            clients.some_more()
            # What is wrong with the new instances is told, and those that there are go on.
            wrong = CONFIG.replace("KIND_CPU", "KIND_GPU") % 2
            assert post(server, "/v2/repository/models/echo/load", {"parameters": {"config": wrong}})[0] != 200
            assert post(server, "/v2/repository/index")[1][0]["state"] == "READY"
            clients.some_more()
        finally:
            clients.finish()
        assert clients.wrong == []
        assert list(server.workers("echo")) == [first], "the first worker was there all the time"
        assert executed(server) == clients.answered, "statistics are those of the whole time"
        server.wait_for_log("version 1: 0 new, 2 removed")
        log = server.log
    updates = re.findall(r"updated the instances of 'echo' version 1: (\d+) new, (\d+) removed", log)
    assert updates == [("2", "0"), ("0", "2")]
    assert log.count("successfully loaded 'echo'") == 1
    assert "was lost" not in log


def test_the_configuration_of_a_load_request_may_be_what_triton_reads_beyond_json(write_model: WriteModel) -> None:
    repository = write_model("echo", CONFIG % 1, ECHO)
    relaxed = """{backend: 'python', instance_group: [{count: 2, kind: "KIND_CPU",},],
        input: [{name: "IN", data_type: "TYPE_INT32", dims: [1]}],
        output: [{name: "OUT", data_type: "TYPE_INT32", dims: [1]}], }"""
    with ServerProcess(repository, "--model-control-mode=explicit") as server:
        assert post(server, "/v2/repository/models/echo/load", {"parameters": {"config": relaxed}}) == (200, None)
        assert configured_count(server) == 2
        wrong = relaxed.replace("count: 2", "count: two")
        assert post(server, "/v2/repository/models/echo/load", {"parameters": {"config": wrong}})[0] == 500
