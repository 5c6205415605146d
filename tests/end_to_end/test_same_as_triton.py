"""Small things that tests of Triton's own check, as a client or a log shows them.

The ensemble has no folder of a version, which Triton wants.
"""

from __future__ import annotations

import http.client
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Name → configuration, and the source of a Python model.
MODELS = {
    "zeros": (
        """
        backend: "identity"
        max_batch_size: 4
        input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [1] },
                { name: "INPUT1" data_type: TYPE_INT32 dims: [2] optional: true } ]
        output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] },
                 { name: "OUTPUT1" data_type: TYPE_INT32 dims: [2] } ]
        response_cache { enable: true }
        """,
        "",
    ),
    "parameters": (
        """
        backend: "python"
        input [ { name: "A" data_type: TYPE_STRING dims: [1] }, { name: "B" data_type: TYPE_STRING dims: [1] } ]
        output [ { name: "OUT" data_type: TYPE_STRING dims: [1] } ]
        """,
        """
import c_python_backend_utils as c_utils
import numpy as np
import triton_python_backend_utils as pb_utils
assert c_utils.Tensor is pb_utils.Tensor and c_utils.MetricKind.GAUGE == pb_utils.MetricFamily.GAUGE
class TritonPythonModel:
    def execute(self, requests):
        made = [np.array([request.parameters()], object) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each)]) for each in made]
""",
    ),
    "partly": (
        """
        backend: "python"
        input [ { name: "IN" data_type: TYPE_FP32 dims: [1] } ]
        output [ { name: "OUT" data_type: TYPE_FP32 dims: [1] }, { name: "NEVER" data_type: TYPE_FP32 dims: [1] } ]
        """,
        """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each)]) for each in given]
""",
    ),
    "ensemble": (
        """
        platform: "ensemble"
        input [ { name: "IN" data_type: TYPE_FP32 dims: [1] } ]
        output [ { name: "OUT" data_type: TYPE_FP32 dims: [1] }, { name: "LEFT_OUT" data_type: TYPE_FP32 dims: [1] } ]
        ensemble_scheduling { step [ { model_name: "partly" model_version: -1
            input_map { key: "IN" value: "IN" }
            output_map [ { key: "OUT" value: "OUT" }, { key: "NEVER" value: "LEFT_OUT" } ] } ] }
        """,
        "",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("models")
    for name, (config, source) in MODELS.items():
        (repository / name / ("" if name == "ensemble" else "1")).mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        if source:
            (repository / name / "1" / "model.py").write_text(source)
    with ServerProcess(
        repository, "--log-verbose=1", "--http-header-forward-pattern=^my_", "--cache-config=local,size=1000000",
        "--metrics-config=summary_latencies=true",
    ) as running:  # fmt: skip
        yield running


def post(server: ServerProcess, path: str, body: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text)


def given(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def test_the_output_of_an_optional_input_that_is_not_given_is_zeros(server: ServerProcess) -> None:
    body = json.dumps({"inputs": [given("INPUT0", "FP32", [3, 1], [1, 2, 3])]})
    status, answer = post(server, "/v2/models/zeros/infer", body)
    outputs = {each["name"]: (each["shape"], each["data"]) for each in answer["outputs"]}
    assert (status, outputs) == (200, {"OUTPUT0": ([3, 1], [1, 2, 3]), "OUTPUT1": ([3, 2], [0] * 6)})


def test_spaces_behind_a_forwarded_header_reach_the_model(server: ServerProcess) -> None:
    inputs = [given(name, "BYTES", [1], ["x"]) for name in "AB"]
    _, answer = post(server, "/v2/models/parameters/infer", json.dumps({"inputs": inputs}), {"my_header": "a \\ "})
    assert json.loads(answer["outputs"][0]["data"][0]) == {"my_header": "a \\ "}


@pytest.mark.parametrize(
    ("body", "named"), [('{"A":"1","B":"2","B":"3","A":"4"}', "B"), ('{"A":"1","B":"2","A":"4","B":"3"}', "A")]
)
def test_of_two_inputs_that_come_twice_the_first_to_come_again_is_named(
    server: ServerProcess, body: str, named: str
) -> None:
    status, answer = post(server, "/v2/models/parameters/generate", body)
    assert (status, answer["error"]) == (400, f"[request id: <id_unknown>] input '{named}' already exists in request")


def test_the_log_names_an_output_that_no_step_of_an_ensemble_has_made(server: ServerProcess) -> None:
    body = json.dumps({"inputs": [given("IN", "FP32", [1], [1])]})
    status, answer = post(server, "/v2/models/ensemble/infer", body)
    assert (status, [each["name"] for each in answer["outputs"]]) == (200, ["OUT"])
    server.wait_for_log("Composing models did not output tensor LEFT_OUT")


def test_a_server_without_a_gpu_has_no_pinned_memory_and_says_so(server: ServerProcess) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        lines = response.read().decode().splitlines()
    assert {"nv_pinned_memory_pool_total_bytes 0", "nv_pinned_memory_pool_used_bytes 0"} <= set(lines)


def test_a_model_with_a_cache_has_no_summary_of_request_durations(server: ServerProcess) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        lines = response.read().decode().splitlines()
    series = [line for line in lines if line.startswith(("nv_inference_request_summary_us", "nv_inference_queue_summ"))]
    cached = {line.partition("{")[0] for line in series if 'model="zeros"' in line}
    assert not any(name.startswith("nv_inference_request_summary_us") for name in cached)
    assert any(name.startswith("nv_inference_queue_summary_us") for name in cached)
    assert any('request_summary_us{model="partly"' in line for line in series)
