"""TensorRT models in whole servers, over a fake TensorRT on a CUDA of POSIX shared memory: no GPU is needed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

from backends.tensorrt.library import MODULE_VARIABLE
from bench.server import ServerFailed, ServerProcess
from kernel.tools.cli import run_command
from shm.cuda import BINDINGS_VARIABLE
from tests.backends.tensorrt.plans import add_sub_plan
from tests.end_to_end.gpu_models import doubled, write_doubles
from tests.fake_tensorrt.plan import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

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


# ---- tensors in CUDA regions of clients --------------------------------------------------------


class EngineClient:
    """A client whose tensors are in its regions on the GPU: A and B, X and Y, with `row_count` rows each."""

    def __init__(self, server: ServerProcess, regions: Any, row_count: int) -> None:
        self.server, self.regions, self.row_count = server, regions, row_count
        self.byte_size = 4 * COUNT * row_count
        self.http = tritonclient.http.InferenceServerClient(server.url)
        self.memory = {name: regions.create_shared_memory_region(name, self.byte_size, 0) for name in "ABXY"}
        for name, memory in self.memory.items():
            self.http.register_cuda_shared_memory(name, regions.get_raw_handle(memory), 0, self.byte_size)

    def arguments(self, a: str = "A") -> dict[str, Any]:
        """Return a request whose input A is in the region `a`."""
        inputs = [tritonclient.http.InferInput(name, [self.row_count, COUNT], "FP32") for name in "AB"]
        outputs = [tritonclient.http.InferRequestedOutput(name) for name in "XY"]
        for each, name in zip([*inputs, *outputs], (a, "B", "X", "Y"), strict=True):
            each.set_shared_memory(name, self.byte_size)
        return {"model_name": "add_sub", "inputs": inputs, "outputs": outputs}

    def fill(self, factor: int) -> None:
        for name in "AB":
            self.regions.set_shared_memory_region(self.memory[name], [rows(self.row_count) * factor])

    def check(self, factor: int) -> None:
        shape = [self.row_count, COUNT]
        found = {name: self.regions.get_contents_as_numpy(self.memory[name], np.float32, shape) for name in "XY"}
        assert np.array_equal(found["X"], 2 * factor * rows(self.row_count))
        assert not found["Y"].any()

    def names(self) -> list[str]:
        return sorted(each["name"] for each in self.http.get_cuda_shared_memory_status())

    def close(self) -> None:
        self.http.close()
        for memory in self.memory.values():
            self.regions.destroy_shared_memory_region(memory)


@pytest.fixture
def engine(fake_gpu: None, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose engine has CUDA graphs for 1 and 8 rows, and none for others."""
    write_model(tmp_path, "dynamic_batching {} optimization { cuda { graphs: true } }")
    with ServerProcess(tmp_path) as server:
        yield server


def figure(server: ServerProcess, name: str) -> float:
    """Return what the metrics page has for the model."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as response:
        page = response.read().decode()
    found = re.search(rf'^{name}{{model="add_sub"[^}}]*}} (\S+)$', page, re.MULTILINE)
    assert found is not None, page
    return float(found[1])


def worker_of(server: ServerProcess) -> psutil.Process:
    children = psutil.Process(server.pid).children(recursive=True)
    [worker] = [each for each in children if any("--model=add_sub" in word for word in each.cmdline())]
    return worker


@pytest.mark.parametrize("row_count", [1, 3])
def test_tensors_go_from_region_to_engine_to_region_without_the_host(
    engine: ServerProcess, regions: Any, row_count: int
) -> None:
    client = EngineClient(engine, regions, row_count)
    for factor in (1, 3):
        client.fill(factor)
        client.http.infer(**client.arguments())
        client.check(factor)
    assert figure(engine, "naiad_copied_tensors_total") == 0
    client.close()


def test_requests_that_are_one_batch_stay_on_the_device(engine: ServerProcess, regions: Any) -> None:
    client, worker = EngineClient(engine, regions, 2), worker_of(engine)
    client.fill(5)

    def infer() -> None:
        with tritonclient.http.InferenceServerClient(engine.url) as other:
            other.infer(**client.arguments())

    worker.send_signal(signal.SIGSTOP)  # so that several wait
    with ThreadPoolExecutor(3) as pool:
        pending = [pool.submit(infer) for _ in range(3)]
        try:
            while figure(engine, "naiad_inference_in_flight_requests") < 3:
                assert not any(each.done() for each in pending)
        finally:
            worker.send_signal(signal.SIGCONT)
        for each in pending:
            each.result()
    client.check(5)
    statistics = client.http.get_inference_statistics("add_sub")["model_stats"][0]
    assert statistics["execution_count"] < statistics["inference_count"] / 2
    assert figure(engine, "naiad_copied_tensors_total") == 0
    client.close()


def test_a_region_that_an_engine_uses_stays_until_the_response(engine: ServerProcess, regions: Any) -> None:
    client, worker = EngineClient(engine, regions, 1), worker_of(engine)
    client.fill(2)

    def infer() -> None:
        with tritonclient.http.InferenceServerClient(engine.url) as other:  # it may be used in one thread only
            other.infer(**client.arguments())

    worker.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(infer)
        try:
            while not figure(engine, "naiad_inference_in_flight_requests"):
                assert not response.done()
            client.http.unregister_cuda_shared_memory()
            assert client.names() == list("ABXY")
        finally:
            worker.send_signal(signal.SIGCONT)
        response.result()
    client.check(2)
    assert client.names() == []
    with pytest.raises(InferenceServerException, match="Unable to find shared memory region"):
        client.http.infer(**client.arguments())
    client.close()


EXPORTER = """
import sys
from tests import fake_cuda
fake_cuda.install()
import tritonclient.utils.cuda_shared_memory as regions
region = regions.create_shared_memory_region("gone", int(sys.argv[1]), 0)
print(regions.get_raw_handle(region).decode(), flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed_costs_its_requests_and_no_others(engine: ServerProcess, regions: Any) -> None:
    client, pid = EngineClient(engine, regions, 1), worker_of(engine).pid
    command = [sys.executable, "-c", EXPORTER, str(client.byte_size)]
    exporter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert exporter.stdout is not None
    assert exporter.stdin is not None
    handle = exporter.stdout.readline().strip().encode()
    client.http.register_cuda_shared_memory("gone", handle, 0, client.byte_size)
    exporter.kill()
    exporter.wait()
    exporter.stdout.close()
    exporter.stdin.close()
    for path in Path("/dev/shm").glob(f"fakecuda-{exporter.pid}-*"):
        path.unlink()  # as a driver does when the process ends
    with pytest.raises(InferenceServerException, match="the exporting process has freed the memory, or has ended"):
        client.http.infer(**client.arguments(a="gone"))
    client.fill(4)
    client.http.infer(**client.arguments())
    client.check(4)
    assert worker_of(engine).pid == pid
    client.close()
