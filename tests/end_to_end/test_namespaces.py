"""Repositories as namespaces: ensembles and calls look in their own repository first."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from bench.server import ServerProcess, wait_for

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = """
input [{ name: "IN" data_type: TYPE_INT32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_INT32 dims: [1] }]
"""

PYTHON = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN")
            value = given.as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", {value})]))
        return responses
"""

CALLS = """
pb_utils.get_output_tensor_by_name(
    pb_utils.InferenceRequest(model_name="part", requested_output_names=["OUT"], inputs=[given]).exec(), "OUT"
).as_numpy()
"""

STEPS = """
ensemble_scheduling { step [{ model_name: "part" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }] }
"""


def write(repository: Path, name: str, config: str, value: str = "") -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config + TENSORS)
    if value:
        (folder / "model.py").write_text(PYTHON.replace("{value}", value.strip()))


def write_repository(repository: Path, kind: str, value: str) -> None:
    """Write a model `part` that adds or subtracts, an ensemble of it, and a model that calls it."""
    write(repository, "part", 'backend: "python"', value)
    write(repository, f"{kind}_ensemble", f'platform: "ensemble" {STEPS}')
    write(repository, f"{kind}_caller", 'backend: "python"', CALLS)


def answer(server: ServerProcess, model: str) -> Any:
    """Return what a model makes of 10, or the error."""
    body = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [10]}]}
    request = urllib.request.Request(f"http://{server.url}/v2/models/{model}/infer", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)["outputs"][0]["data"][0]
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]


def test_an_ensemble_and_a_call_use_the_model_of_their_own_repository(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_repository(first, "add", "value + 1")
    write_repository(second, "sub", "value - 1")
    with ServerProcess(
        first, f"--model-repository={second}", "--model-namespacing=true",
        "--model-control-mode=poll", "--repository-poll-secs=1",
    ) as server:  # fmt: skip
        models = ("add_ensemble", "add_caller", "sub_ensemble", "sub_caller")
        assert [answer(server, model) for model in models] == [11, 11, 9, 9]
        assert "There are 2 identifiers of model 'part'" in answer(server, "part")

        # Without a model of its own, an ensemble uses that of another repository, and its own again when it is back.
        shutil.move(first / "part", tmp_path / "away")
        wait_for(lambda: [answer(server, model) for model in (*models, "part")] == [9, 9, 9, 9, 9])
        shutil.move(tmp_path / "away", first / "part")
        wait_for(lambda: [answer(server, model) for model in models] == [11, 11, 9, 9])
        assert "There are 2 identifiers of model 'part'" in answer(server, "part")
