"""Shadows of a real server under load: clients never notice them, and the report says which outputs differ."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from backends.supervision.idle_priority import regains_priority
from bench.server import ServerProcess, wait_for
from tests.end_to_end.traffic_models import call, load, write_model

#: Both versions write into their inputs. Version 4 has other numbers for inputs that begin with a multiple of 10.
CODE = """
import os
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]
        with open(os.path.join(args["model_repository"], self.version, "pid"), "w") as file:
            file.write(str(os.getpid()))
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().copy()
            first = value[0]
            if self.version == "4" and first == 12345:
                os._exit(3)
            value *= 2
            if self.version == "4" and first % 10 == 0:
                value += first + 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]))
        return responses
"""

RULE = """
labels = { stable = 3, next = 4 }
weights = { stable = 1 }
shadow = { to = "next", waiting = 256 }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    write_model(made, CODE, RULE)
    return made


def shadow(server: ServerProcess) -> Any:
    return call(server, "/v2/models/m/traffic")["shadow"]


def load_of_clients(server: ServerProcess, clients: int, each: int) -> None:
    """Send requests of many clients; each response is that of version 3."""
    assert asyncio.run(load(server, clients, lambda _, value: 2 * value, each=each)).keys() == {"3"}


def settled(server: ServerProcess) -> Any:
    """Wait until each request that was chosen is compared or dropped; returns the report."""

    def is_settled() -> bool:
        found = shadow(server)
        return bool(found["sampled"] == found["pairs"] + sum(found["dropped"].values()))

    wait_for(is_settled)
    return shadow(server)


def test_outputs_are_compared_under_load_and_the_worst_requests_are_replayed(repository: Path, tmp_path: Path) -> None:
    with ServerProcess(repository) as server:
        load_of_clients(server, 16, 60)
        found = settled(server)
        assert found["sampled"] == 16 * 60, "every request was chosen"
        assert found["pairs"] >= 100, found
        assert 0 < found["different"] < found["pairs"]
        assert found["outputs"]["OUT"]["different"] == {"values": found["different"]}
        assert found["worst"], "everybody may read it, so it has no ids and no values"
        assert {(*each,) for each in found["worst"]} == {("distance", "why")}
        page = server.get("/metrics", server.metrics_port)[1]
        different = 'naiad_traffic_shadow_pairs_total{model="m",result="different",target="next"} '
        assert f"{different}{found['different']}" in page
        command = [sys.executable, "-m", "kernel"]
        folder = tmp_path / "worst"
        shown = subprocess.run(
            [*command, "traffic", "m", "--url", server.url, "--worst", str(folder)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert f"different {found['different']}" in shown.stdout
        assert re.search(r"shadow: next, 100 % of the requests", shown.stdout)
        replayed = subprocess.run(
            [*command, "replay", str(folder), "--to", server.url, "--speed", "0"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert replayed.returncode == 1, replayed.stdout + replayed.stderr
        assert "output 'OUT' differs" in replayed.stdout


def is_low(pid: int) -> bool:
    """Whether a process has only the processor time that nobody else wants."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/autogroup").read_text().split()[-1] == "19":
            return True
    return os.sched_getscheduler(pid) == os.SCHED_IDLE


def test_the_workers_of_a_shadow_wait_for_everybody_else_until_a_client_uses_them(repository: Path) -> None:
    if not os.access("/proc/self/autogroup", os.W_OK) and not regains_priority():
        pytest.skip("the system has no priority that a process gets back from")
    with ServerProcess(repository) as server:
        stable, candidate = (int((repository / "m" / version / "pid").read_text()) for version in ("3", "4"))
        assert not is_low(candidate)
        while not is_low(candidate):  # without privileges the system takes one change in 0.1 s
            load_of_clients(server, 2, 20)
            assert settled(server)["pairs"] > 0
        assert not is_low(stable)
        body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}
        call(server, "/v2/models/m/versions/4/infer", body)
        wait_for(lambda: not is_low(candidate))


def test_a_shadow_that_dies_costs_no_client_a_response(repository: Path) -> None:
    with ServerProcess(repository) as server:
        body = {"id": "fatal", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [12345]}]}
        request = urllib.request.Request(f"http://{server.url}/v2/models/m/infer", json.dumps(body).encode())
        with urllib.request.urlopen(request) as response:
            assert json.load(response)["outputs"][0]["data"] == [24690]
        wait_for(lambda: shadow(server)["pairs"] == 1)
        assert shadow(server)["outputs"][""]["different"] == {"error": 1}
        load_of_clients(server, 8, 20)
        assert settled(server)["sampled"] == 161


def test_the_worst_requests_are_only_for_those_who_administer_the_server(repository: Path) -> None:
    with ServerProcess(repository, "--admin-access=key", "--admin-key=secret") as server:
        path = f"http://{server.url}/v2/models/m/traffic/shadow/worst"
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(path)
        assert raised.value.code == 403
        raised.value.close()
        with urllib.request.urlopen(urllib.request.Request(path, headers={"admin-key": "secret"})) as response:
            assert response.read().startswith(b"NAIADREC")
        report = f"http://{server.url}/v2/models/m/traffic"
        for headers, by in (({}, ""), ({"admin-key": "secret"}, "file")):
            with urllib.request.urlopen(urllib.request.Request(report, headers=headers)) as response:
                [change] = json.load(response)["history"]
            assert change["by"].partition(" ")[0] == by
        rollout = f"http://{server.url}/v2/models/m/rollout"
        for path, body in ((rollout, b'{"to": 4, "stable": 3}'), (f"{rollout}/pause", b"{}")):
            urllib.request.urlopen(urllib.request.Request(path, body, {"admin-key": "secret"})).close()
        for headers, by in (({}, ""), ({"admin-key": "secret"}, "HTTP")):
            for path in (rollout, report):
                with urllib.request.urlopen(urllib.request.Request(path, headers=headers)) as response:
                    text = response.read().decode()
                state = json.loads(text)
                state = state.get("rollout", state)
                assert (state["phase"], state["reason"], state["by"].partition(" ")[0]) == ("paused", "paused", by)
                assert ("127.0.0.1" in text) == bool(by), "nobody else learns who it was"
                assert ("with the key in header admin-key" in text) == bool(by)
