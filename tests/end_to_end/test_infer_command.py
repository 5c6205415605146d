"""`naiad infer` and `naiad ready` at a terminal: every datatype and shape, and what people get wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from onnx import helper

from bench.server import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Model → its datatype and dimensions: `identity`, whose output is its input.
MODELS = {
    **{name.lower(): (f"TYPE_{name}", "-1") for name in ("BOOL", "INT8", "UINT64", "FP16", "BF16", "FP32", "STRING")},
    "two_dims": ("TYPE_FP32", "-1, -1"),
}

#: Fails while the server starts, so that this is never ready.
BROKEN = 'backend: "identity"\ninput [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]\n'

RAISING_CONFIG = """
backend: "python"
input [{ name: "INPUT" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUTPUT" data_type: TYPE_FP32 dims: [-1] }]
"""
RAISING = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("no \x1b weights")
"""


def naiad(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernel", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    for name, (datatype, dims) in MODELS.items():
        tensors = "".join(
            f"{kind} [{{ name: '{kind.upper()}' data_type: {datatype} dims: [{dims}] }}]\n"
            for kind in ("input", "output")
        )
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(f'backend: "identity"\n{tensors}')
    (repository / "raising" / "1").mkdir(parents=True)
    (repository / "raising" / "config.pbtxt").write_text(RAISING_CONFIG)
    (repository / "raising" / "1" / "model.py").write_text(RAISING)
    (repository / "no_dims" / "1").mkdir(parents=True)
    onnx.save(_identity_of_a_scalar(), repository / "no_dims" / "1" / "model.onnx")
    with ServerProcess(repository) as server:
        yield server


def _identity_of_a_scalar() -> onnx.ModelProto:
    tensors = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, []) for name in ("INPUT", "OUTPUT")]
    node = helper.make_node("Identity", ["INPUT"], ["OUTPUT"])
    graph = helper.make_graph([node], "identity", tensors[:1], tensors[1:])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


@pytest.mark.parametrize(
    ("model", "value", "lines"),
    [
        ("bool", "[true,false]", ["OUTPUT  BOOL 2", "  true, false"]),
        ("int8", "-128", ["OUTPUT  INT8 1", "  -128"]),
        ("uint64", "18446744073709551615", ["OUTPUT  UINT64 1", "  18446744073709551615"]),
        ("fp16", "[0.5,65504]", ["OUTPUT  FP16 2", "  0.5, 65504"]),
        ("bf16", "[0.5,-1e38]", ["OUTPUT  BF16 2", "  0.5, -9.96921e+37"]),
        ("fp32", '[0.1,"nan",Infinity]', ["OUTPUT  FP32 3", "  0.1, nan, inf"]),
        ("fp32", "[]", ["OUTPUT  FP32 0", "  no elements"]),
        ("string", "12:30:noon", ["OUTPUT  BYTES 1", "  12:30:noon"]),
        ("string", "7", ["OUTPUT  BYTES 1", "  7"]),
        ("string", "", ["OUTPUT  BYTES 1", "  "]),
        ("string", '["a","é\\u001b"]', ["OUTPUT  BYTES 2", "  a", "  é\\u001b"]),
        ("two_dims", "[[1,2],[3,4]]", ["OUTPUT  FP32 2x2", "  1, 2, 3, 4"]),
        ("no_dims", "2.5", ["OUTPUT  FP32 1", "  2.5"]),
    ],
)
def test_every_datatype_and_shape_comes_back(server: ServerProcess, model: str, value: str, lines: list[str]) -> None:
    done = naiad("infer", model, f"INPUT={value}", f"--url={server.url}")
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (lines, "", 0)


def test_a_response_as_json_has_all_elements_on_one_line(server: ServerProcess) -> None:
    done = naiad("infer", "fp16", f"INPUT={list(range(100))}", "--json", f"--url={server.url}")
    assert (done.stderr, done.returncode, done.stdout.count("\n")) == ("", 0, 1)
    found = json.loads(done.stdout)
    assert (found["model_name"], found["model_version"]) == ("fp16", "1")
    assert found["outputs"] == [{"name": "OUTPUT", "datatype": "FP16", "shape": [100], "data": list(range(100))}]
    refused = naiad("infer", "int8", "INPUT=128", "--json", f"--url={server.url}")
    assert (refused.returncode, refused.stdout) == (1, "")


def test_a_numpy_file_keeps_its_shape(server: ServerProcess, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(6, dtype=np.float16).reshape(2, 3))
    done = naiad("infer", "two_dims", f"INPUT=@{tmp_path}/x.npy", f"--url={server.url}")
    assert done.stdout == "OUTPUT  FP32 2x3\n  0, 1, 2, 3, 4, 5\n"


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("nobody", ["X=1"], "'nobody' is not found; the server has bf16, bool, fp16, fp32, int8, no_dims, raising, "),
        ("int8", [], "model 'int8' takes INPUT (INT8 [-1]): give each as NAME=VALUE, NAME=@FILE.npy or NAME=@random"),
        ("int8", ["INPUT=128"], "input 'INPUT' is INT8: 128 is not between -128 and 127"),
        ("int8", ["INPUT=x"], "input 'INPUT' is INT8: \"x\" is not a whole number"),
        ("two_dims", ["INPUT=[[1,2],[3]]"], "input 'INPUT' is no tensor: its lists have different lengths"),
        ("string", ["INPUT=a", "-c3"], "--classes: numbers have classes, and model 'string' has only OUTPUT (BYTES)"),
        ("int8:9", ["INPUT=1"], "the server returned 404: "),
    ],
)
def test_a_mistake_is_one_line(server: ServerProcess, model: str, arguments: list[str], said: str) -> None:
    done = naiad("infer", model, *arguments, f"--url={server.url}")
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_an_exception_of_a_model_has_a_line_for_each_frame(server: ServerProcess) -> None:
    done = naiad("infer", "raising", "INPUT=1", f"--url={server.url}")
    first, *others = done.stderr.splitlines()
    assert first.endswith(r"message: ValueError: no \u001b weights")
    assert others == ["", "At:", "  raising/1/model.py(4): execute"]


def test_ready_says_so_with_its_exit_code(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (naiad("ready", f"--url={server.url}").stdout, naiad("ready", "--url=http://127.0.0.1:9").returncode) == (
        "ready\n",
        1,
    )
    monkeypatch.setenv("NAIAD_HTTP_PORT", str(server.http_port))  # as in a container
    done = naiad("ready")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


def test_ready_says_that_a_model_is_missing(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.pbtxt").write_text(BROKEN)
    with ServerProcess(tmp_path, "--exit-on-error=false") as server:
        done = naiad("ready", f"--url={server.url}")
    first, second = done.stderr.splitlines()
    assert (done.returncode, first) == (1, "not ready: its models are not all ready")
    assert second.startswith("  broken UNAVAILABLE: ")
