"""Servers whose workers Ray places, with Ray itself: `make test-ray`. The contract of launchers has more."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess, wait_for
from tests.backends.hosts.ray_cluster import HOST

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [-1] }]
"""

#: Adds 1; -1 ends the worker.
MODEL = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if value[0] == -1:
                os.kill(os.getpid(), 9)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value + 1)]))
        return responses
"""


@pytest.fixture
def repository(tmp_path: Path, ray_address: str) -> Path:
    return write_model(tmp_path / "models", "m")


def write_model(repository: Path, name: str, more: str = "") -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'name: "{name}" backend: "python" {CONFIG} {more}')
    (folder / "1" / "model.py").write_text(MODEL)
    return repository


@pytest.fixture
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository, "--launcher=ray", "--model-control-mode=explicit", "--load-model=m") as running:
        yield running


def infer(server: ServerProcess, *values: int, model: str = "m") -> Any:
    """Return the values of the output, or the text of the error."""
    tensor = {"name": "IN", "datatype": "INT32", "shape": [len(values)], "data": list(values)}
    found = json.loads(post(server, f"/v2/models/{model}/infer", {"inputs": [tensor]}))
    return found["error"] if "error" in found else found["outputs"][0]["data"]


def post(server: ServerProcess, path: str, body: Any) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=120)) as connection:
        connection.request("POST", path, json.dumps(body))
        return connection.getresponse().read()


def broker(server: ServerProcess) -> int:
    """Return the process id of the broker; 0 if there is none."""
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        if b"ray_broker" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    return 0


def processes() -> list[int]:
    """Return the processes of this machine that have the environment of the cluster."""
    found, ours = [], f"RAY_AUTH_TOKEN_PATH={os.environ['RAY_AUTH_TOKEN_PATH']}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if ours in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def command(pid: int) -> bytes:
    """Return the command of a process; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def agents() -> list[int]:
    """Return the process ids of the agents that Ray has placed on this machine."""
    return [pid for pid in processes() if b"backends.hosts.ray_actor" in command(pid)]


def test_workers_and_brokers_that_die_come_back_and_the_server_takes_its_agents_with_it(server: ServerProcess) -> None:
    assert infer(server, 1, 2) == [2, 3]
    stats = json.loads(server.get("/v2/models/m/stats")[1])["model_stats"][0]
    assert stats["instance_hosts"] == {"m_0": HOST}
    assert "ray/_raylet" not in Path(f"/proc/{server.pid}/maps").read_text()
    assert "was lost" in infer(server, -1)
    wait_for(lambda: infer(server, 1) == [2], 120)

    first = broker(server)
    os.kill(first, signal.SIGKILL)
    assert infer(server, 5) == [6]
    wait_for(lambda: broker(server) not in (0, first), 120)
    assert infer(server, 5) == [6]
    assert "was lost" in infer(server, -1)
    wait_for(lambda: infer(server, 1) == [2], 120)  # the new broker has placed it

    assert len(agents()) == 1
    assert server.stop() == 0
    wait_for(lambda: not agents(), 60)


def test_requests_go_on_while_a_host_and_the_broker_are_killed(repository: Path) -> None:
    write_model(repository, "two", "instance_group [{ count: 2 kind: KIND_CPU }]")
    with ServerProcess(repository, "--launcher=ray", "--model-control-mode=explicit", "--load-model=two") as server:
        before = set(agents())
        assert len(before) == 2
        wrong, counts, over = list[Any](), [0] * 8, threading.Event()

        def ask(number: int) -> None:
            while not over.is_set():
                found = infer(server, number, counts[number], model="two")
                if found != [number + 1, counts[number] + 1]:
                    wrong.append(found)
                counts[number] += 1

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(len(counts))]
        for client in clients:
            client.start()
        try:
            for victim in (min(before), broker(server)):
                base = sum(counts)
                os.kill(victim, signal.SIGKILL)
                wait_for(lambda base=base: sum(counts) > base + 100, 120)  # type: ignore[misc]
            wait_for(lambda: len(agents()) == 2 and set(agents()) != before, 120)
            base = sum(counts)
            wait_for(lambda: sum(counts) > base + 100, 120)
        finally:
            over.set()
            for client in clients:
                client.join()
        assert wrong == []


def test_a_server_that_is_killed_leaves_no_agent(server: ServerProcess) -> None:
    assert infer(server, 1) == [2]
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: not agents(), 60)


def test_workers_serve_on_while_the_head_of_the_cluster_does_not_respond(server: ServerProcess) -> None:
    (head,) = [pid for pid in processes() if b"gcs_server" in command(pid)]
    os.kill(head, signal.SIGSTOP)
    try:
        server.wait_for_log("Ray places no workers: the head of the cluster has not responded for 10 s")
        assert 'naiad_launcher_up{launcher="ray"} 0' in server.get("/metrics", server.metrics_port)[1]
        assert infer(server, 1) == [2]
    finally:
        os.kill(head, signal.SIGCONT)
    wait_for(lambda: 'naiad_launcher_up{launcher="ray"} 1' in server.get("/metrics", server.metrics_port)[1], 120)
    assert infer(server, 1) == [2]
    assert "was lost" in infer(server, -1)
    wait_for(lambda: infer(server, 1) == [2], 120)


def test_the_index_says_which_resources_are_waited_for(repository: Path) -> None:
    write_model(repository, "g", 'parameters { key: "naiad.resources" value { string_value: "gpus=1" } }')
    with ServerProcess(repository, "--launcher=ray", "--model-control-mode=explicit", "--load-model=m") as server:
        loading = threading.Thread(target=post, args=(server, "/v2/repository/models/g/load", {}))
        loading.start()
        try:
            wait_for(lambda: "waiting for resources: 1 CPU, 1 GPU; none of the 1 hosts" in reason(server, "g"), 60)
            assert infer(server, 1) == [2]
        finally:
            server.stop()
            loading.join()
    wait_for(lambda: not agents(), 60)


def reason(server: ServerProcess, model: str) -> str:
    """Return the reason in the repository index."""
    for each in json.loads(post(server, "/v2/repository/index", {})):
        if each["name"] == model:
            return str(each.get("reason", ""))
    return ""
