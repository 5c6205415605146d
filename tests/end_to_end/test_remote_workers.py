"""Servers whose workers run on another host: an agent on loopback, of which they get neither memory nor paths."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import trustme

from bench.remote import certificate_files
from bench.server import ServerProcess, wait_for
from tests.backends.hosts.agent_process import AgentProcess

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel

CONFIG = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [-1] }]
"""

#: Adds 1, after a time in milliseconds that the first value says.
SLOW = """
import os, time

class TritonPythonModel:
    def initialize(self, args):
        print("files are in", os.path.dirname(__file__), flush=True)

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if value[0] > 0:
                print("begins", flush=True)
                time.sleep(value[0] / 1000)
            if value[0] == -1:
                os.kill(os.getpid(), 9)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value + 1)]))
        return responses
"""


def infer(server: ServerProcess, *values: int, model: str = "m", sequence: dict[str, Any] | None = None) -> Any:
    """Return the values of the output, or the text of the error."""
    body: dict[str, Any] = {
        "inputs": [{"name": "IN", "datatype": "INT32", "shape": [len(values)], "data": list(values)}]
    }
    if sequence is not None:
        body["parameters"] = sequence
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)) as connection:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
        found = json.loads(connection.getresponse().read())
    return found["error"] if "error" in found else found["outputs"][0]["data"]


def reason(server: ServerProcess) -> str:
    """Return the reason in the repository index."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)) as connection:
        connection.request("POST", "/v2/repository/index", "{}")
        found: str = json.loads(connection.getresponse().read())[0].get("reason", "")
    return found


def beside(repository: Path, name: str) -> Path:
    """Return a folder of a host, which is not in the repository."""
    return repository.with_name(f"{repository.name}-{name}")


def flags(*agents: AgentProcess) -> tuple[str, str]:
    return "--launcher=agent", "--agents=" + ",".join(agent.address for agent in agents)


def test_a_model_is_served_by_workers_of_another_host(write_model: WriteModel, tmp_path: Path) -> None:
    repository = write_model("m", CONFIG, SLOW)
    with AgentProcess(beside(tmp_path, "agent")) as agent, ServerProcess(repository, *flags(agent)) as server:
        assert infer(server, 0, 5) == [1, 6]
        large = list(range(300_000))
        assert infer(server, *large) == [each + 1 for each in large]
        assert [name for name in server.workers().values() if not name.startswith("helper")] == []
        (worker,) = agent.workers()
        server.wait_for_log(f"m: files are in {agent.cache}/")
        status, body = server.get("/v2/models/m/stats")
        assert (status, json.loads(body)["model_stats"][0]["instance_hosts"]) == (200, {"m_0": "far"})
        assert "was lost" in infer(server, -1)
        wait_for(lambda: agent.workers() not in ([], [worker]))
        wait_for(lambda: infer(server, 0, 7) == [1, 8])
        server.wait_for_log("the worker of model instance 'm_0' was lost: killed by signal 9 (SIGKILL)")
        assert server.stop() == 0
        wait_for(lambda: not agent.workers())


def test_requests_of_a_lost_host_are_executed_by_another_one(write_model: WriteModel, tmp_path: Path) -> None:
    repository = write_model("m", CONFIG + "instance_group [{ count: 2 kind: KIND_CPU }]", SLOW)
    with (
        AgentProcess(beside(tmp_path, "one"), host="one") as one,
        AgentProcess(beside(tmp_path, "two"), host="two") as two,
        ServerProcess(repository, *flags(one, two)) as server,
    ):
        hosts = json.loads(server.get("/v2/models/m/stats")[1])["model_stats"][0]["instance_hosts"]
        assert hosts in ({"m_0_0": "one", "m_0_1": "two"}, {"m_0_0": "two", "m_0_1": "one"})
        found: dict[int, Any] = {}
        threads = [threading.Thread(target=lambda n=n: found.update({n: infer(server, 1000, n)})) for n in range(4)]
        for thread in threads:
            thread.start()
        server.wait_for_log("m: begins")
        server.wait_for_log("m_0_1: begins")
        one.kill()
        for thread in threads:
            thread.join()
        assert found == {n: [1001, n + 1] for n in range(4)}
        server.wait_for_log("the host was lost (its connection")
        # The lost instance is placed on the host that is left.
        wait_for(lambda: len(two.workers()) == 2)


def test_a_host_that_is_cut_off_is_lost_by_its_silence_and_the_index_says_what_is_waited_for(
    write_model: WriteModel, tmp_path: Path
) -> None:
    repository = write_model("m", CONFIG, SLOW)
    with AgentProcess(beside(tmp_path, "agent")) as agent, ServerProcess(repository, *flags(agent)) as server:
        assert infer(server, 0) == [1]
        agent.signal(signal.SIGSTOP)  # nothing is sent and no connection ends, as with a link that is down
        server.wait_for_log("the host was lost (nothing was received from it for 2 s)")
        wait_for(lambda: "waiting for resources: an agent" in reason(server))
        agent.signal(signal.SIGCONT)
        wait_for(lambda: infer(server, 0, 2) == [1, 3])
        wait_for(lambda: len(agent.workers()) == 1)  # the old one was ended
        assert reason(server) == ""


def test_a_model_whose_requests_may_not_be_repeated_fails_with_its_host(
    write_model: WriteModel, tmp_path: Path
) -> None:
    parameter = 'parameters { key: "naiad.retry_on_worker_loss" value { string_value: "false" } }'
    repository = write_model("m", CONFIG + parameter, SLOW)
    with AgentProcess(beside(tmp_path, "agent")) as agent, ServerProcess(repository, *flags(agent)) as server:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(infer(server, 60_000)))
        thread.start()
        server.wait_for_log("begins")
        agent.kill()
        thread.join()
        assert "which may have reached the model (the host was lost (its connection" in found[0]
        assert "was not retried" in found[0]


def test_workers_are_here_while_there_is_room_and_then_elsewhere(write_model: WriteModel, tmp_path: Path) -> None:
    repository = write_model("m", CONFIG + "instance_group [{ count: 2 kind: KIND_CPU }]", SLOW)
    with (
        AgentProcess(beside(tmp_path, "agent")) as agent,
        ServerProcess(repository, "--launcher=auto", "--max-local-workers=1", f"--agents={agent.address}") as server,
    ):
        assert len([name for name in server.workers().values() if not name.startswith("helper")]) == 1
        (worker,) = agent.workers()
        hosts = json.loads(server.get("/v2/models/m/stats")[1])["model_stats"][0]["instance_hosts"]
        assert list(hosts.values()) == ["far"]
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: agent.workers() not in ([], [worker]))  # here is still one
        assert infer(server, 0, 5) == [1, 6]
        page = server.get("/metrics", server.metrics_port)[1]
        assert 'naiad_launcher_workers{launcher="agent",node="far"} 1' in page
        assert 'naiad_launcher_up{launcher="agent"} 1' in page


def test_a_model_chooses_its_launcher(write_model: WriteModel, tmp_path: Path) -> None:
    write_model("here", CONFIG, SLOW)
    parameter = 'parameters { key: "naiad.launcher" value { string_value: "agent" } }'
    repository = write_model("there", CONFIG + parameter, SLOW)
    with (
        AgentProcess(beside(tmp_path, "agent")) as agent,
        ServerProcess(repository, "--launcher=local,agent", f"--agents={agent.address}") as server,
    ):
        assert infer(server, 0, model="here") == infer(server, 0, model="there") == [1]
        assert "here" in server.workers().values()
        assert "there" not in server.workers().values()
        assert len(agent.workers()) == 1


def test_agents_with_certificates_serve_who_has_one_of_their_authority(write_model: WriteModel, tmp_path: Path) -> None:
    repository, folder = write_model("m", CONFIG, SLOW), beside(tmp_path, "files")
    folder.mkdir()
    authority = trustme.CA()
    of_agent, of_server = certificate_files(authority, folder, "agent"), certificate_files(authority, folder, "server")
    of_stranger = {**certificate_files(trustme.CA(), folder, "stranger"), "root-cert-file": of_server["root-cert-file"]}

    def options(files: dict[str, Path]) -> list[str]:
        return [f"--agent-{flag}={path}" for flag, path in files.items()]

    with AgentProcess(folder / "agent", *(f"--{flag}={path}" for flag, path in of_agent.items())) as agent:
        with ServerProcess(repository, *flags(agent), *options(of_server)) as server:
            large = list(range(300_000))
            wait_for(lambda: infer(server, *large) == [each + 1 for each in large])
            os.kill(agent.workers()[0], signal.SIGKILL)
            server.wait_for_log("the worker of model instance 'm_0' was lost: killed by signal 9 (SIGKILL)")
            wait_for(lambda: infer(server, 0, 7) == [1, 8])
            agent.kill()
            server.wait_for_log("the host was lost (its connection")
            agent.start()
            wait_for(lambda: infer(server, 0, 7) == [1, 8])
        for files, text in ((options(of_stranger), "refuses our certificate"), ([], "it may be no agent, or one that")):
            with ServerProcess(repository, *flags(agent), "--model-control-mode=explicit", *files) as server:
                server.wait_for_log(text)
        wait_for(lambda: "the certificate of the server is refused: " in agent.log)
    assert agent.log.count("uses this host") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--listen=0.0.0.0:7000"],
            "error: --listen=0.0.0.0:7000 is an address for other hosts: it needs --token-file",
        ),
        (
            ["--listen=127.0.0.1:0", "--cert-file=a", "--root-cert-file=b"],
            "error: --key-file is missing: --cert-file, --key-file, --root-cert-file are given together or not at all",
        ),
        (["--listen=7000"], "error: --listen: '7000' is no address of the form HOST:PORT, with a port from 0 to 65535"),
    ],
)
def test_an_agent_says_what_is_wrong_with_its_options(arguments: list[str], text: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "kernel", "agent", *arguments],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert (ended.returncode, ended.stderr.strip()) == (1, text)
