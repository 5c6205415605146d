"""An ONNX model on a GPU in a whole server: onnxruntime and CUDA are fakes (`tests/fake_onnxruntime.py`)."""

from __future__ import annotations

import collections
import functools
import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import tritonclient.http
from onnx import TensorProto, helper

from bench.server import wait_for
from tests.end_to_end.gpu_clients import copies
from tests.end_to_end.gpu_models import doubled, server_on_fakes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bench.server import ServerProcess

pytestmark = pytest.mark.slow

#: In every process of the server: the fake takes the place of what the backend uses of GPUs.
SITE = """
import onnxruntime
from tests.fake_onnxruntime import FakeOnnxRuntime
fake = FakeOnnxRuntime()
import tests.fake_onnxruntime
tests.fake_onnxruntime.EXECUTION_S, tests.fake_onnxruntime.NOTES = 0.002, "{notes}"
tests.fake_onnxruntime.HOLD = "{hold}"
for name in ("get_available_providers", "preload_dlls", "InferenceSession"):
    setattr(onnxruntime, name, getattr(fake, name))
"""

CONFIG = """
backend: "onnxruntime"
instance_group [{ kind: KIND_GPU gpus: [0] count: %d }]
"""

#: Two steps of the same model: the second one reads what the first one has left, which may be another instance.
TWICE = """
platform: "ensemble"
max_batch_size: 4
input [{ name: "A" data_type: TYPE_FP32 dims: [2048] }, { name: "B" data_type: TYPE_FP32 dims: [2048] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [2048] }]
ensemble_scheduling { step [
  { model_name: "add_sub" model_version: -1 input_map { key: "A" value: "A" } input_map { key: "B" value: "B" }
    output_map { key: "X" value: "between" } },
  { model_name: "add_sub" model_version: -1 input_map { key: "A" value: "between" } input_map { key: "B" value: "B" }
    output_map { key: "X" value: "OUT" } }
] }
"""

#: Four instances, which are in one process unless the server says otherwise, each with a stream.
THREADS = """
backend: "onnxruntime"
max_batch_size: 1
instance_group [{ kind: KIND_GPU gpus: [0] count: 4 }]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def notes(root: Path) -> Path:
    return root / "notes"


@pytest.fixture(scope="module")
def hold(root: Path) -> Path:
    """The file that makes runs wait until four streams have one."""
    return root / "hold"


@pytest.fixture(scope="module")
def server(root: Path, notes: Path, hold: Path) -> Iterator[ServerProcess]:
    version = root / "models/add_sub/1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG % 2)
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2048]) for name in "ABXY"}
    nodes = [helper.make_node("Add", ["A", "B"], ["X"]), helper.make_node("Sub", ["A", "B"], ["Y"])]
    graph = helper.make_graph(nodes, "g", [values["A"], values["B"]], [values["X"], values["Y"]])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), version / "model.onnx"
    )
    (root / "models/twice/1").mkdir(parents=True)
    (root / "models/twice/config.pbtxt").write_text(TWICE)
    shutil.copytree(version.parent, root / "models/single")
    (root / "models/single/config.pbtxt").write_text(CONFIG % 1)
    shutil.copytree(version.parent, root / "models/threads")
    (root / "models/threads/config.pbtxt").write_text(THREADS)
    with server_on_fakes(root, SITE.format(notes=notes, hold=hold)) as running:
        yield running


def test_batches_are_computed_on_the_gpu(server: ServerProcess) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}", concurrency=4) as client:
        config = client.get_model_config("single")
        assert config["max_batch_size"] == 4  # completed from the file
        assert config["instance_group"][0]["kind"] == "KIND_GPU"
        pending = []
        for factor in range(8):
            a, b = (np.full((1, 2048), value, np.float32) for value in (factor * 2, factor))
            inputs: list[Any] = []
            for name, array in (("A", a), ("B", b)):
                inputs.append(tritonclient.http.InferInput(name, list(array.shape), "FP32"))
                inputs[-1].set_data_from_numpy(array)
            pending.append(client.async_infer("single", inputs))
        for factor, found in enumerate(pending):
            result = found.get_result()
            assert np.array_equal(result.as_numpy("X"), np.full((1, 2048), factor * 3, np.float32))
            assert np.array_equal(result.as_numpy("Y"), np.full((1, 2048), factor, np.float32))


def is_replaced(server: ServerProcess, client: Any, process: int) -> bool:
    workers = workers_of_threads(server)
    return bool(workers) and process not in workers and bool(client.is_model_ready("threads"))


def workers_of_threads(server: ServerProcess) -> list[int]:
    return [pid for pid, name in server.workers().items() if "threads" in name]


def infer_many(client: Any, model: str, count: int) -> None:
    """Send this many requests, 16 at a time, and check what they get."""
    pending: collections.deque[tuple[int, Any]] = collections.deque()
    for number in range(count):
        inputs: list[Any] = []
        for name, value in (("A", number * 2), ("B", number)):
            inputs.append(tritonclient.http.InferInput(name, [1, 2048], "FP32"))
            inputs[-1].set_data_from_numpy(np.full((1, 2048), value, np.float32))
        pending.append((number, client.async_infer(model, inputs)))
        while len(pending) == 16 or (pending and number == count - 1):
            sent, response = pending.popleft()
            result = response.get_result()
            assert np.array_equal(result.as_numpy("X"), np.full((1, 2048), sent * 3, np.float32))
            assert np.array_equal(result.as_numpy("Y"), np.full((1, 2048), sent, np.float32))


def test_batches_overlap_under_load(server: ServerProcess, notes: Path) -> None:
    """The next batch is enqueued while one is computed: then a thread of the worker waits for the device."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}", concurrency=16) as client:
        infer_many(client, "single", 400)
    assert "naiad device" in notes.read_text()


def test_instances_in_one_process_compute_at_once_and_are_lost_together(server: ServerProcess, hold: Path) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}", concurrency=8) as client:
        for _ in range(2):
            infer_many(client, "threads", 100)
            (process,) = workers_of_threads(server)
            os.kill(process, signal.SIGKILL)
            wait_for(functools.partial(is_replaced, server, client, process), 60)
        hold.touch()
        infer_many(client, "threads", 16)
        assert not hold.exists(), "four streams never had a run at the same time"


def test_outputs_of_calls_stay_on_the_gpu(server: ServerProcess) -> None:
    for _ in range(2):
        doubled(server, 2048)


def test_an_instance_finds_what_another_one_of_its_process_has_left_on_the_gpu(server: ServerProcess) -> None:
    """CUDA refuses to open a handle in the process that has exported the memory."""
    before = copies(server, "add_sub")
    a, b = np.full((1, 2048), 5, np.float32), np.full((1, 2048), 2, np.float32)
    inputs = []
    for name, array in (("A", a), ("B", b)):
        inputs.append(tritonclient.http.InferInput(name, [1, 2048], "FP32").set_data_from_numpy(array))
    with tritonclient.http.InferenceServerClient(server.url, concurrency=16) as client:
        pending = [client.async_infer("twice", inputs) for _ in range(100)]
        for found in pending:
            assert np.array_equal(found.get_result().as_numpy("OUT"), a + 2 * b)
    # Both inputs of the first step, one of the second one, and the output; fewer where batches are joined.
    assert copies(server, "add_sub") - before <= 400
