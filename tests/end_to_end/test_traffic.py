"""Traffic rules of a real server, over both protocols and under load, from the file, the API and the command."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from bench.server import ServerProcess
from kernel.traffic.route import bucket_of, seed_of
from tests.end_to_end.traffic_models import call, load, write_model

if TYPE_CHECKING:
    from pathlib import Path

#: Adds the number of its version, so that the outputs say which version has executed a request.
CODE = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.version = float(args["model_version"])
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT",
            pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() + self.version)]) for request in requests]
"""

CHAIN = """
platform: "ensemble"
input [{ name: "A" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "Z" data_type: TYPE_FP32 dims: [-1] }]
ensemble_scheduling { step [
  { model_name: "m" model_version: -1 input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "b" } },
  { model_name: "m" model_version: -1 input_map { key: "IN" value: "b" } output_map { key: "OUT" value: "Z" } }
] }
"""

RULE = """
[labels]
stable = 3
canary = 4
[weights]
stable = 80
canary = 20
[[rules]]
header = "x-tenant"
is = ["acme"]
to = "canary"
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "models"
    write_model(made, CODE, RULE)
    (made / "chain" / "1").mkdir(parents=True)
    (made / "chain" / "config.pbtxt").write_text(CHAIN)
    return made


def ask(server: ServerProcess, headers: dict[str, str] | None = None, version: str = "", model: str = "m") -> Any:
    """Return the version that the response names, and the value of its first output for 0."""
    name = "A" if model == "chain" else "IN"
    body = {"inputs": [{"name": name, "datatype": "FP32", "shape": [1], "data": [0]}]}
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
    request = urllib.request.Request(f"http://{server.url}{path}", json.dumps(body).encode(), headers or {})
    with urllib.request.urlopen(request) as response:
        found = json.load(response)
    return found["model_version"], found["outputs"][0]["data"][0]


def test_a_rule_of_a_file_an_api_and_a_command(repository: Path) -> None:
    with ServerProcess(repository) as server:
        counts = asyncio.run(load(server, 16, each=60))
        total = 16 * 60
        assert counts.total() == total, "each request has one response"
        assert abs(counts["4"] - 0.2 * total) < 4 * math.sqrt(total * 0.2 * 0.8)
        assert ask(server, {"X-Tenant": "acme"}) == ("4", 4)
        assert ask(server, version="stable") == ("3", 3)
        assert ask(server, version="canary") == ("4", 4)
        assert call(server, "/v2/models/m/versions/canary")["versions"] == ["4"]
        assert call(server, "/v2/models/m/versions/stable/stats")["model_stats"][0]["version"] == "3"
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(server, version="latest")
        raised.value.close()
        assert raised.value.code == 404, "as in Triton, where only numbers are versions"

        # The same over gRPC; a label that the model does not have gets Triton's text.
        client = tritonclient.grpc.InferenceServerClient(server.grpc_url)
        tensor = tritonclient.grpc.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        for label, version in (("stable", "3"), ("canary", "4")):
            response = client.infer("m", [tensor], label).get_response()
            assert response.model_version == version
        assert client.infer("m", [tensor], headers={"x-tenant": "acme"}).get_response().model_version == "4"
        assert client.is_model_ready("m", "canary")
        assert client.get_model_metadata("m", "canary").versions == ["4"]
        with pytest.raises(InferenceServerException, match=r"specified version string 'latest' \(details: stol\)"):
            client.infer("m", [tensor], "latest")

        # The API changes the rule while the server runs, and the model is not loaded again.
        call(server, "/v2/models/m/traffic", {"key": "header:x-user", "weights": {"stable": 50, "canary": 50}})
        for user in ("ann", "bob", "cho", "dan"):
            expected = "4" if bucket_of(user, seed_of("m", "")) < 5000 else "3"
            assert {ask(server, {"x-user": user})[0] for _ in range(3)} == {expected}
        report = call(server, "/v2/models/m/traffic")
        assert report["source"] == "client"
        assert [change["by"].split()[0] for change in report["history"]] == ["HTTP", "file"]
        page = server.get("/metrics", server.metrics_port)[1]
        assert 'naiad_traffic_share{model="m",target="m",version="4"} 0.5' in page
        assert re.search(r'naiad_traffic_requests_total\{by="key",model="m",version="4"\} [1-9]', page)

        command = [sys.executable, "-m", "kernel", "traffic", "m", "--url", server.url]
        shown = subprocess.run([*command, "stable=1"], capture_output=True, text=True, check=True).stdout
        assert "stable" in shown
        assert "100 %" in shown
        assert {ask(server)[0] for _ in range(10)} == {"3"}
        subprocess.run([*command, "--reset"], capture_output=True, check=True)
        assert call(server, "/v2/models/m/traffic")["source"] == "file"
        wrong = subprocess.run([*command, "beta=1"], capture_output=True, text=True, check=False)
        assert wrong.returncode == 1
        assert "'beta' in 'weights' names no target" in wrong.stderr
        assert server.log.count("successfully loaded 'm'") <= 2, "no change has loaded the model again"


def test_one_request_of_an_ensemble_sees_one_version_of_a_model(repository: Path) -> None:
    with ServerProcess(repository) as server:
        call(server, "/v2/models/m/traffic", {"weights": {"stable": 50, "canary": 50}})
        found = Counter(ask(server, model="chain")[1] for _ in range(60))
        assert found.keys() == {6, 8}, "3 + 3 or 4 + 4, never 3 + 4"
        assert ask(server, {"x-tenant": "acme"}, model="chain")[1] == 8


def test_a_changed_file_has_effect_at_the_next_poll_and_loads_nothing(repository: Path) -> None:
    with ServerProcess(repository, "--model-control-mode=poll", "--repository-poll-secs=1") as server:
        loads = server.log.count("successfully loaded")
        (repository / "m" / "traffic.toml").write_text("weights = { '3' = 1 }\n")
        server.wait_for_log("traffic rule {'weights': {'3': 1}}")
        assert {ask(server)[0] for _ in range(10)} == {"3"}
        (repository / "m" / "traffic.toml").write_text("weights = { x = 1 }\n")
        server.wait_for_log("traffic.toml has no effect: 'x' in 'weights' names no target")
        assert {ask(server)[0] for _ in range(10)} == {"3"}
        (repository / "m" / "traffic.toml").unlink()
        server.wait_for_log("traffic rule None")
        assert {ask(server)[0] for _ in range(10)} == {"4"}
        assert server.log.count("successfully loaded") == loads


def test_a_load_request_reads_the_file_again_and_loads_nothing(repository: Path) -> None:
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=m") as server:
        loads = server.log.count("successfully loaded")
        (repository / "m" / "traffic.toml").write_text("weights = { '3' = 1 }\n")
        urllib.request.urlopen(
            urllib.request.Request(f"http://{server.url}/v2/repository/models/m/load", b"{}")
        ).close()
        assert {ask(server)[0] for _ in range(10)} == {"3"}
        assert server.log.count("successfully loaded") == loads
