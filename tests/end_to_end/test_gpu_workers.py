"""Instances on GPUs, over a CUDA of POSIX shared memory (`tests/fake_cuda`): no GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import psutil
import pytest
import tritonclient.http
from tritonclient.utils import shared_memory

from backends.helper.device_tasks import NVML_VARIABLE
from bench.server import ServerFailed, ServerProcess, wait_for
from shm.cuda import BINDINGS_VARIABLE
from tests.end_to_end.gpu_clients import COUNT, PLUS_ONE, PYTHON_CONFIG, Client, Regions, copies, page, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.end_to_end.conftest import WriteModel


CONFIG = """
backend: "plus_one"
max_batch_size: 8
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
instance_group [{ %s }]
dynamic_batching { max_queue_delay_microseconds: 1000 }
"""


@pytest.fixture
def repository(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a model with this instance group, and returns the repository."""

    def write(group: str) -> Path:
        folder = tmp_path / "models" / "plus"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(CONFIG % group)
        (folder / "backend.py").write_text(PLUS_ONE)
        return tmp_path / "models"

    return write


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def serve(repository: Path, *options: str, gpus: int = 1) -> ServerProcess:
        monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
        monkeypatch.setenv("FAKE_CUDA_DEVICES", str(gpus))
        monkeypatch.setenv(NVML_VARIABLE, "tests.fake_cuda.nvml")
        started.append(ServerProcess(repository, *options).__enter__())
        return started[-1]

    yield serve
    for each in started:
        each.__exit__(None, None, None)


def test_a_model_on_a_gpu_gets_inputs_and_gives_outputs_there(
    repository: Callable[[str], Path], served: Callable[..., ServerProcess]
) -> None:
    server = served(repository("kind: KIND_GPU"))
    client = Client(server)
    for values in (rows(1, columns=4), rows(1), rows(3, 7)):
        assert client.infer(values).tolist() == (values + 1).tolist()
    assert client.http.get_model_config("plus")["instance_group"][0]["gpus"] == [0]


def test_requests_of_a_batch_are_gathered_in_one_block_of_the_device(
    repository: Callable[[str], Path], served: Callable[..., ServerProcess]
) -> None:
    client = Client(served(repository("kind: KIND_GPU")))
    many = [rows(1, 1000 * number) for number in range(24)]
    waiting = [client.http.async_infer("plus", [client.given(values)]) for values in many]
    for values, each in zip(many, waiting, strict=True):
        assert each.get_result().as_numpy("OUT").tolist() == (values + 1).tolist()
    executions = client.http.get_inference_statistics("plus")["model_stats"][0]["execution_count"]
    assert executions < len(many)


def test_a_model_without_instance_groups_runs_on_all_gpus_that_are_there(
    repository: Callable[[str], Path], served: Callable[..., ServerProcess]
) -> None:
    server = served(repository("count: 1"), gpus=2)
    group = Client(server).http.get_model_config("plus")["instance_group"][0]
    assert (group["kind"], group["gpus"]) == ("KIND_GPU", [0, 1])
    workers = [
        process.environ()["CUDA_VISIBLE_DEVICES"]
        for process in psutil.Process(server.pid).children(recursive=True)
        if any(argument.startswith("--model=plus") for argument in process.cmdline())
    ]
    uuids = "GPU-00000000-0000-0000-0000-000000000000,GPU-00000000-0000-0000-0000-000000000001"
    assert workers == [uuids, uuids]


def test_figures_of_gpus_are_on_the_metrics_page_under_tritons_names(
    repository: Callable[[str], Path], served: Callable[..., ServerProcess]
) -> None:
    server = served(repository("kind: KIND_GPU gpus: 0"), "--metrics-interval-ms=1", gpus=2)
    first, second = (f'{{gpu_uuid="GPU-00000000-0000-0000-0000-00000000000{number}"}}' for number in "01")
    wait_for(lambda: f"nv_gpu_utilization{first} 0.25" in page(server))  # a helper asks for them
    lines = page(server).splitlines()
    assert f"nv_gpu_utilization{first} 0.25" in lines
    assert f"nv_gpu_memory_total_bytes{second} {1 << 30}" in lines
    assert f"nv_gpu_memory_used_bytes{first} 0" in lines
    assert f"nv_gpu_power_usage{first} 120.5" in lines
    assert f"nv_gpu_power_limit{first} 700" in lines
    assert any(line.startswith(f"nv_energy_consumption{first} ") for line in lines)
    assert not any(line.startswith(f"nv_energy_consumption{second}") for line in lines)
    assert "nv_pinned_memory_pool_total_bytes 268435456" in lines
    assert f"nv_pinned_memory_pool_used_bytes {64 << 20}" in lines


def test_a_server_without_gpus_says_so_and_a_model_may_use_the_cpu(
    repository: Callable[[str], Path], served: Callable[..., ServerProcess]
) -> None:
    with pytest.raises(ServerFailed, match="has kind KIND_GPU but no GPUs are available"):
        served(repository("kind: KIND_GPU"), gpus=0)


def test_models_that_need_a_gpu_are_valid_where_one_is(
    repository: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    monkeypatch.setenv(NVML_VARIABLE, "tests.fake_cuda.nvml")
    command = [sys.executable, "-m", "kernel", "models", str(repository("count: 1")), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (found,) = json.loads(done.stdout)
    assert (found["valid"], found["reason"], done.returncode) == (True, "", 0)
    assert found["config"]["instance_group"][0]["gpus"] == [0, 1]


def test_a_gpu_that_is_too_full_or_too_old_is_refused(
    repository: Callable[[str], Path], served: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = repository("kind: KIND_GPU")
    monkeypatch.setenv("FAKE_CUDA_USED", str(900 << 20))
    full = "can not create model 'plus_0_0': memory limit set for GPU 0 has exceeded, model loading is rejected."
    with pytest.raises(ServerFailed, match=re.escape(full)):
        served(folder, "--model-load-gpu-limit=0:0.5")
    monkeypatch.setenv("FAKE_CUDA_CAPABILITY", "5.2")
    with pytest.raises(ServerFailed, match="no GPUs are available"):
        served(folder)
    Client(served(folder, "--min-supported-compute-capability=5.0", "--model-load-gpu-limit=0:0.9"))


@pytest.mark.parametrize("possible", [True, False])
def test_shared_memory_of_requests_is_pinned_while_they_go_on(
    repository: Callable[[str], Path],
    served: Callable[..., ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
    possible: bool,
) -> None:
    if not possible:
        monkeypatch.setenv("FAKE_CUDA_PINS_NOTHING", "1")
    server = served(repository("kind: KIND_GPU"))
    client = Client(server)
    key, byte_size = f"/naiad-test-{os.getpid()}", 2 << 20
    region = shared_memory.create_shared_memory_region("large", key, byte_size)
    try:
        client.http.register_system_shared_memory("large", key, byte_size)
        given = tritonclient.http.InferInput("IN", [1, 100 * COUNT], "FP32").set_shared_memory("large", 400 * COUNT)
        wanted = tritonclient.http.InferRequestedOutput("OUT")
        wanted.set_shared_memory("large", 400 * COUNT, 1 << 20)
        for number in range(40):  # first unpinned, then pinned
            values = rows(1, number, 100 * COUNT)
            shared_memory.set_shared_memory_region(region, [values])
            client.http.infer("plus", [given], outputs=[wanted])
            found = shared_memory.get_contents_as_numpy(region, np.float32, [100 * COUNT], 1 << 20)
            assert np.array_equal(found, values[0] + 1)
            assert np.array_equal(client.infer(values), values + 1)  # through the arenas
        client.http.unregister_system_shared_memory("large")
        assert np.array_equal(client.infer(values), values + 1)
    finally:
        shared_memory.destroy_shared_memory_region(region)
    if not possible:
        server.wait_for_log("cannot be pinned, and are copied without")
    assert server.log.count("cannot be pinned, and are copied without") == (0 if possible else 1)


def test_tensors_go_from_region_to_region_without_a_copy_on_the_host(
    repository: Callable[[str], Path], served: Callable[..., ServerProcess], regions: Any
) -> None:
    server = served(repository("kind: KIND_GPU"))
    client = Regions(server, regions)
    for start in (0, 5):
        values = rows(1, start)
        assert client.infer("plus", values).tolist() == (values + 1).tolist()
    assert copies(server, "plus") == 0
    Client(server).infer(rows(1))
    assert copies(server, "plus") == 2  # its input to the device, its output from there


# Gives its input back, through DLPack where it is on the GPU, with the methods that libraries use.
PASSES_ON = """
class TritonPythonModel:
    def initialize(self, args):
        self.where = args["model_instance_kind"] + args["model_instance_device_id"]

    def execute(self, requests):
        responses = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN")
            if given.is_cpu():
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", -given.as_numpy())]))
                continue
            assert given.__dlpack_device__() == (2, 0) and self.where == "GPU0"
            try:
                given.as_numpy()
                raise AssertionError("as_numpy works")
            except pb_utils.TritonModelException as error:
                assert "Tensor is stored in GPU and cannot be converted to NumPy." in str(error)
            source = given.to_dlpack() if given.shape()[1] == 4 else given
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", source)]))
        return responses
"""


def test_a_python_model_gets_tensors_on_the_gpu_where_it_wants_them(
    write_model: WriteModel, served: Callable[..., ServerProcess], regions: Any
) -> None:
    write_model("stays", PYTHON_CONFIG % "no", PASSES_ON)
    server = served(write_model("comes", PYTHON_CONFIG % "yes", PASSES_ON))
    client = Regions(server, regions)
    for values in (rows(1), rows(2, 3, columns=4)):
        assert client.infer("stays", values).tolist() == values.tolist()
        assert copies(server, "stays") == 0
        assert client.infer("comes", values).tolist() == (-values).tolist()
    given = tritonclient.http.InferInput("IN", [2, 4], "FP32")
    given.set_shared_memory("in", 32)
    answer = client.http.infer("stays", [given]).as_numpy("OUT")
    assert answer.tolist() == rows(2, 3, columns=4).tolist()


STREAMS = """
import numpy as np
import triton_python_backend_utils as pb_utils
from tests.fake_cuda import runtime

class TritonPythonModel:
    def execute(self, requests):
        counts = []
        for request in requests:
            given = pb_utils.get_input_tensor_by_name(request, "IN")
            rows = given.shape()[0]
            # On how many devices the process has a context.
            counts.append(np.full((rows, 1), float(len(runtime.contexts)), np.float32))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", count)]) for count in counts]
"""


def test_a_python_model_makes_nothing_on_its_gpu_before_a_tensor_is_there(
    write_model: WriteModel, served: Callable[..., ServerProcess], regions: Any
) -> None:
    server = served(write_model("lazy", PYTHON_CONFIG % "no", STREAMS))
    assert Client(server, "lazy").infer(rows(1, columns=4)).tolist() == [[0]]
    given = tritonclient.http.InferInput("IN", [2, 4], "FP32")
    Regions(server, regions)
    given.set_shared_memory("in", 32)
    http = Client(server, "lazy").http
    assert http.infer("lazy", [given]).as_numpy("OUT").shape == (2, 1)


@pytest.mark.parametrize("completes", [True, False], ids=["completed", "complete"])
def test_an_onnx_model_without_a_kind_runs_on_the_cpu_where_onnxruntime_has_no_code_for_gpus(
    tmp_path: Path, served: Callable[..., ServerProcess], completes: bool
) -> None:
    for name in ("first", "second"):
        folder = tmp_path / "models" / name / "1"
        folder.mkdir(parents=True)
        given, result = (onnx.helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, [None, 2]) for each in "AX")
        node = onnx.helper.make_node("Neg", ["A"], ["X"])
        graph = onnx.helper.make_graph([node], name, [given], [result])
        opsets = [onnx.helper.make_opsetid("", 17)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9), folder / "model.onnx")
        if not completes:
            tensors = (
                'input [{ name: "A" data_type: TYPE_FP32 dims: 2 }] output [{ name: "X" data_type: TYPE_FP32 dims: 2 }]'
            )
            (folder.parent / "config.pbtxt").write_text(f'backend: "onnxruntime" max_batch_size: 4 {tensors}')
    server = served(tmp_path / "models", *([] if completes else ["--disable-auto-complete-config"]), gpus=2)
    client = tritonclient.http.InferenceServerClient(server.url)
    for name in ("first", "second"):
        group = client.get_model_config(name)["instance_group"][0]
        assert (group["kind"], group["count"]) == ("KIND_CPU", 2), "as on a machine without GPUs"
        values = tritonclient.http.InferInput("A", [1, 2], "FP32").set_data_from_numpy(np.ones((1, 2), np.float32))
        assert client.infer(name, [values]).as_numpy("X").tolist() == [[-1, -1]]
    line = "models of backend 'onnxruntime' run on the CPU unless their configuration says KIND_GPU: the installed"
    server.wait_for_log(line)
    assert server.log.count(line) == 1
