"""Workers die; every request is accounted for, and the server goes on."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from tests.end_to_end.conftest import WriteModel

#: Faults have the same effects however workers are started.
pytestmark = pytest.mark.usefixtures("worker_start")

ECHO_CONFIG = """
max_batch_size: 0
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
instance_group [{ kind: KIND_CPU count: 2 }]
"""

# Notes every request that it starts in a ledger beside the model, then answers after a moment.
ECHO = """
import os, time
LEDGER = os.path.join(pb_utils.get_model_dir(), "ledger")

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            with open(LEDGER, "a") as ledger:
                ledger.write(f"{value[0]}\\n")
            if value[0] < 0:
                os._exit(7)
            time.sleep(0.002)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""


# Forks. The child raises SystemExit or returns, so that it goes on as if it were the worker.
FORKS = """
import os, sys

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            child = os.fork()
            if not child and value[0]:
                sys.exit(5)
            ended = os.waitpid(child, 0)[0] == child if child else False
            found = value * 0 + (os.getpid() if ended else -1)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", found)]))
        return responses
"""


# Answers how many of its objects, made while it was loaded, the collector still walks.
FROZEN = """
import gc

class TritonPythonModel:
    def initialize(self, args):
        self.made = [[] for _ in range(100)]

    def execute(self, requests):
        walked = {id(found) for found in gc.get_objects()}
        count = np.array([sum(id(made) in walked for made in self.made)], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", count)]) for _ in requests]
"""


def infer(connection: http.client.HTTPConnection, model: str, value: int) -> tuple[int, dict[str, Any]]:
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [value]}]})
    connection.request("POST", f"/v2/models/{model}/infer", body)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


class Load:
    """Clients that send numbered requests until told to stop, and note one outcome for each."""

    def __init__(self, server: ServerProcess, clients: int) -> None:
        self.outcomes: dict[int, str] = {}
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n, clients)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, step: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.http_port, timeout=60)
        while not self._stop.is_set():
            status, answer = infer(connection, "echo", number)
            if status == 200:
                assert answer["outputs"][0]["data"] == [number]
                self.outcomes[number] = "ok"
            else:
                self.outcomes[number] = f"{status} {answer['error']}"
            number += step
        connection.close()

    def finish(self) -> dict[int, str]:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request hangs"
        return self.outcomes


def test_killed_workers_lose_only_what_they_were_executing(write_model: WriteModel) -> None:
    repository = write_model("echo", ECHO_CONFIG, ECHO)
    with ServerProcess(repository) as server:
        load = Load(server, clients=8)
        kills = 0
        for _ in range(5):
            seen = len(load.outcomes)
            wait_for(lambda seen=seen: len(load.outcomes) > seen + 50)  # type: ignore[misc]
            victim = next(iter(server.workers("echo")))
            os.kill(victim, signal.SIGKILL)
            kills += 1
            wait_for(lambda victim=victim: victim not in server.workers() and len(server.workers("echo")) == 2)  # type: ignore[misc]
        outcomes = load.finish()
        wait_for(lambda: server.log.count("was lost: killed by signal 9") >= kills)
        log = server.log
    errors = {number: text for number, text in outcomes.items() if text != "ok"}
    assert len(errors) <= kills, errors
    for text in errors.values():
        assert text.startswith("503 ")
        assert "echo_0_" in text
        assert "signal 9 (SIGKILL)" in text
    started = Counter(map(int, (repository / "echo/1/ledger").read_text().split()))
    assert set(started) >= {number for number, text in outcomes.items() if text == "ok"}
    assert max(started.values()) == 1, "a request was executed twice"
    assert log.count("was lost: killed by signal 9") == kills


def test_a_request_that_kills_its_worker_is_answered_once_and_named(write_model: WriteModel) -> None:
    repository = write_model("echo", ECHO_CONFIG, ECHO)
    with ServerProcess(repository) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        status, answer = infer(connection, "echo", -1)
        assert status == 503
        assert "exit code 7" in answer["error"]
        assert infer(connection, "echo", 5)[0] == 200
        wait_for(lambda: len(server.workers("echo")) == 2)
        connection.close()
    assert (repository / "echo/1/ledger").read_text().split().count("-1") == 1


def test_when_memory_runs_out_workers_end_before_the_server(write_model: WriteModel) -> None:
    repository = write_model("echo", ECHO_CONFIG, ECHO)
    with ServerProcess(repository) as server:

        def score(pid: int) -> int:
            return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

        assert {score(pid) for pid in server.workers("echo")} == {min(score(server.pid) + 100, 1000)}


def test_a_child_of_a_model_does_not_respond_in_its_name(write_model: WriteModel) -> None:
    repository = write_model("forks", ECHO_CONFIG.replace("count: 2", "count: 1"), FORKS)
    with ServerProcess(repository) as server:
        (worker,) = server.workers("forks")
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        for value in (1, 0, 1):
            status, answer = infer(connection, "forks", value)
            assert (status, answer["outputs"][0]["data"]) == (200, [worker])
        connection.close()


def test_a_queued_request_goes_to_the_worker_that_is_started_next(write_model: WriteModel) -> None:
    config = ECHO_CONFIG.replace("count: 2", "count: 1")
    repository = write_model("echo", config, ECHO)
    with ServerProcess(repository) as server:
        connections = [http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60) for _ in range(6)]
        body = {"name": "IN", "datatype": "INT32", "shape": [1]}
        for number, connection in enumerate(connections):
            value = -1 if number == 0 else number
            text = json.dumps({"inputs": [{**body, "data": [value]}]})
            connection.request("POST", "/v2/models/echo/infer", text)
        statuses = [connection.getresponse().status for connection in connections]
        for connection in connections:
            connection.close()
    assert Counter(statuses) == {200: 5, 503: 1}


def test_the_collector_does_not_walk_what_was_there_when_the_model_was_loaded(write_model: WriteModel) -> None:
    repository = write_model("frozen", ECHO_CONFIG, FROZEN)
    with ServerProcess(repository) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        status, answer = infer(connection, "frozen", 0)
        connection.close()
    assert (status, answer["outputs"][0]["data"]) == (200, [0])


def test_a_killed_server_leaves_no_worker_and_no_shared_memory(write_model: WriteModel) -> None:
    repository = write_model("echo", ECHO_CONFIG, ECHO)
    with ServerProcess(repository) as server:
        workers = server.workers()
        for pid in (server.pid, *workers):
            assert "/dev/shm/" not in Path(f"/proc/{pid}/maps").read_text(), "memory with a name outlives its processes"
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_what_a_model_prints_lands_in_the_log_with_its_name(write_model: WriteModel) -> None:
    repository = write_model(
        "talker",
        ECHO_CONFIG,
        """
        import sys

        class TritonPythonModel:
            def initialize(self, args):
                print("hello from initialize", flush=True)
                print("a warning", file=sys.stderr, flush=True)
                pb_utils.Logger.log_info("through the logger")

            def execute(self, requests):
                return [None for _ in requests]
        """,
    )
    with ServerProcess(repository) as server:
        for line in ("hello from initialize", "a warning", "through the logger"):
            server.wait_for_log(f'talker: {line}"')


def test_a_model_that_fails_to_load_hurts_no_other(write_model: WriteModel) -> None:
    write_model("echo", ECHO_CONFIG, ECHO)
    repository = write_model("broken", ECHO_CONFIG, "raise RuntimeError('no luck')\n")
    with ServerProcess(repository, "--exit-on-error=false", "--strict-readiness=false") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
        assert infer(connection, "echo", 3)[0] == 200
        connection.request("POST", "/v2/repository/index", "{}")
        index = {item["name"]: item for item in json.loads(connection.getresponse().read())}
        connection.close()
    assert index["echo"]["state"] == "READY"
    assert index["broken"]["state"] == "UNAVAILABLE"
    assert "no luck" in index["broken"]["reason"]
