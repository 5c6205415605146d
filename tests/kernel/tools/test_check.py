"""`naiad check` loads models and finds those whose outputs depend on the batch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kernel.options import DEMO_REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 20000 }
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
WARM_UP = """
model_warmup [ { name: "sample" batch_size: 1
  inputs { key: "IN" value { data_type: TYPE_FP32 dims: [ 5 ] random_data: true } } } ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ { model_name: "right" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } } ] }
"""
SEQUENCE = """
backend: "python"
sequence_batching { }
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
SOURCE = """
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        {initialize}

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        {execute}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.asarray(each, np.float32))]) for each in made]
"""
RIGHT = "made = [each * 2 for each in given]"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernel", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)


def write(folder: Path, name: str, execute: str, config: str = CONFIG, initialize: str = "pass") -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(config)
    (folder / name / "1" / "model.py").write_text(SOURCE.format(execute=execute, initialize=initialize))


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what the command finds about models that are right, and wrong in one way each."""
    folder = tmp_path_factory.mktemp("models")
    write(folder, "right", RIGHT)
    write(folder, "warm", "assert given[0].shape[1] == 5; " + RIGHT, CONFIG + WARM_UP)
    write(folder, "sequence", RIGHT, SEQUENCE)
    write(folder, "steps", RIGHT, ENSEMBLE)
    write(folder, "swaps_rows", "made = [each[::-1] for each in given]")
    write(folder, "mixes_requests", "made = [each + len(given) for each in given]")
    output = 'name: "OUT" data_type: TYPE_FP32 dims: [ -1 ]'
    write(folder, "datatype", RIGHT, CONFIG.replace(output, output.replace("FP32", "INT32")))
    write(folder, "name", RIGHT, CONFIG.replace(output, output.replace("OUT", "RESULT")))
    write(folder, "shape", RIGHT, CONFIG.replace(output, output.replace("-1", "-1, 3")))
    write(folder, "rounds", "made = [each * np.float32(2 + 1e-6 * (len(each) > 1)) for each in given]")
    write(folder, "varies", "made = [each + np.random.rand() for each in given]")
    write(folder, "refuses", "raise ValueError('not a token')")
    write(folder, "sizes", "assert given[0].shape[1] == 16; " + RIGHT)
    write(folder, "crashes", "os._exit(3) if len(given) > 1 or len(given[0]) > 1 else None; " + RIGHT)
    write(folder, "grows", "self.kept = np.ones(1 << 23); " + RIGHT)
    write(folder, "fails", RIGHT, initialize="raise OSError('no weights')")
    write(folder, "mistake", RIGHT, CONFIG + "max_batch: 8")
    entries = findings(folder, 1, "--slow", "600", "--timeout", "60")  # however long it takes on a busy machine
    slow = tmp_path_factory.mktemp("slow")
    write(slow, "slow", RIGHT, initialize="time.sleep(3)")
    return {entry["name"]: entry for entry in (*entries, *findings(slow, 0, "--slow", "2.9"))}


def findings(folder: Path, code: int, *flags: str) -> list[dict[str, Any]]:
    done = check(str(folder), "--json", *flags)
    assert (done.returncode, done.stderr) == (code, "")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("name", "verdict", "said"),
    [
        ("right", "ok", ""),
        ("warm", "ok", ""),
        ("sequence", "ok", ""),
        ("steps", "ok", ""),
        ("swaps_rows", "differs", "as rows of one request: output 'OUT' differs by up to"),
        ("mixes_requests", "differs", "together with others: output 'OUT' differs by up to"),
        ("datatype", "breaks", "output 'OUT' is FP32, but the configuration says INT32"),
        ("name", "breaks", "output 'RESULT' is in the configuration, but no response has it"),
        ("shape", "breaks", "output 'OUT' has shape [1, 4], but the configuration says [-1, -1, 3]"),
        ("rounds", "ok", "rounding only: "),
        ("varies", "varies", "a second time alone: output 'OUT' differs by up to"),
        ("refuses", "refused", "no request of the trial succeeds: Failed to process the request(s) for model"),
        ("sizes", "ok", ""),
        ("crashes", "crashed", "a worker of the model died during the trial"),
        ("slow", "ok", "slow: it took "),
        ("fails", "failed", "OSError: no weights"),
        ("mistake", "failed", 'has no field named "max_batch"'),
    ],
)
def test_each_model_has_its_verdict(found: dict[str, dict[str, Any]], name: str, verdict: str, said: str) -> None:
    assert found[name]["verdict"] == verdict, found[name]
    assert said in "\n".join(found[name]["findings"])
    assert bool(found[name]["findings"]) == bool(said)


def test_inputs_are_those_of_the_warm_up_or_random(found: dict[str, dict[str, Any]]) -> None:
    assert found["warm"]["inputs"] == "warm-up"
    assert found["right"]["inputs"] == "random, variable dimensions 4"
    assert found["sizes"]["inputs"] == "random, variable dimensions 16"


def test_the_memory_of_a_models_workers_is_measured(found: dict[str, dict[str, Any]]) -> None:
    assert 1 << 20 < found["right"]["loaded_byte_size"] < 1 << 28
    assert found["grows"]["tried_byte_size"] - found["grows"]["loaded_byte_size"] > 60 << 20
    assert found["steps"]["loaded_byte_size"] == 0


def test_the_demo_models_pass_and_the_table_says_so() -> None:
    done = check(str(DEMO_REPOSITORY))
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[3] for line in lines if line[1:2] in (["add_sub"], ["count"], ["digits"])] == ["ok"] * 3


def test_a_folder_without_models_is_an_error(tmp_path: Path) -> None:
    done = check(str(tmp_path))
    assert (done.returncode, done.stderr) == (
        1,
        f"error: the repository '{tmp_path}' has no models: each is a folder with its files in a folder of a version, "
        f"such as '{tmp_path}/NAME/1/model.onnx'\n",
    )
