"""TensorRT models in whole servers, over a fake TensorRT on a CUDA of POSIX shared memory: no GPU is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http

from backends.tensorrt.plans.library import MODULE_VARIABLE
from bench.server import ServerFailed, ServerProcess
from kernel.command.cli import run_command
from shm.cuda import BINDINGS_VARIABLE
from tests.backends.tensorrt.plans import add_sub_plan
from tests.end_to_end.gpu_models import doubled, write_doubles
from tests.fake_tensorrt.plan import encode

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 3000


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv(MODULE_VARIABLE, "tests.fake_tensorrt")
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1")


def write_model(repository: Path, config: str = "", **plan: Any) -> None:
    folder = repository / "add_sub"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.plan").write_bytes(encode(add_sub_plan(COUNT, **plan)))


def rows(count: int) -> Any:
    return np.arange(count * COUNT, dtype=np.float32).reshape(count, COUNT)


def infer(server: ServerProcess, count: int) -> Any:
    client = tritonclient.http.InferenceServerClient(server.url)
    inputs = [tritonclient.http.InferInput(name, [count, COUNT], "FP32") for name in "AB"]
    for each in inputs:
        each.set_data_from_numpy(rows(count))
    return client.infer("add_sub", inputs)


@pytest.mark.usefixtures("fake_gpu")
def test_a_plan_without_a_configuration_is_served(tmp_path: Path) -> None:
    write_model(tmp_path, "optimization { cuda { graphs: true } }")
    with ServerProcess(tmp_path) as server:
        client = tritonclient.http.InferenceServerClient(server.url)
        config = client.get_model_config("add_sub")
        assert (config["backend"], config["platform"], config["max_batch_size"]) == ("tensorrt", "tensorrt_plan", 8)
        assert config["instance_group"][0]["kind"] == "KIND_GPU"
        for count in (1, 5, 8):  # with and without a graph
            response = infer(server, count)
            assert np.array_equal(response.as_numpy("X"), 2 * rows(count))
            assert not response.as_numpy("Y").any()


@pytest.mark.usefixtures("fake_gpu")
def test_a_plan_of_another_version_says_what_to_do(tmp_path: Path) -> None:
    write_model(tmp_path, version="10.3.0.26")
    with pytest.raises(ServerFailed) as caught, ServerProcess(tmp_path):
        pass
    assert "The plan is of another version of TensorRT than this server's, 11.4.0.106" in str(caught.value)


@pytest.mark.usefixtures("fake_gpu")
def test_a_model_that_build_engine_writes_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx_file = tmp_path / "add_sub.onnx"
    onnx_file.write_bytes(encode(add_sub_plan(COUNT)))
    shapes = [f"--{kind}-shapes=A:{count}x{COUNT},B:{count}x{COUNT}" for kind, count in (("min", 1), ("max", 4))]
    output = f"--output={tmp_path / 'models' / 'add_sub'}"
    monkeypatch.setattr("sys.argv", ["naiad", "build-engine", str(onnx_file), *shapes, output])
    assert run_command() == 0
    with ServerProcess(tmp_path / "models") as server:
        assert np.array_equal(infer(server, 3).as_numpy("X"), 2 * rows(3))


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("graphs", ["", "optimization { cuda { graphs: true } }"], ids=["no graphs", "graphs"])
def test_outputs_of_calls_stay_on_the_gpu(tmp_path: Path, graphs: str) -> None:
    write_model(tmp_path, graphs)
    write_doubles(tmp_path)
    with ServerProcess(tmp_path) as server:
        for _ in range(2):
            doubled(server, COUNT)
