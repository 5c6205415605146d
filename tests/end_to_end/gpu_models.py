"""Models on the GPUs of the fake that call one another, for the tests of calls."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http

from backends.helper.device_tasks import NVML_VARIABLE
from bench.server import ServerProcess
from shm.cuda import BINDINGS_VARIABLE
from tests.end_to_end.calling_models import HEAD, Models
from tests.end_to_end.gpu_clients import PLUS_ONE
from tests.end_to_end.gpu_clients import copies as copies_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.calling_models import Served

#: The models compute on the GPU with this number.
ON_GPU = """
instance_group [{ kind: KIND_GPU gpus: [%d] }]
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
"""
ON_CPU = "instance_group [{ kind: KIND_CPU }]\n"

CONFIG = """
backend: "%s"
input [{ name: "IN" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }]
"""

#: Calls the model `called` once, with its first result of `plus`, and says where the result was.
THEN = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            first = call("plus", renamed(given(request))).exec()
            assert not first.has_error(), first.error().message()
            (tensor,) = first.output_tensors()
            assert not tensor.is_cpu()
            response = call("called", renamed(tensor)%s).exec()
            if response.has_error():
                found.append(pb_utils.InferenceResponse(error=response.error()))
                continue
            (result,) = response.output_tensors()
            assert (result.is_cpu(), result.__dlpack_device__()) == (%s), result.__dlpack_device__()
            found.append(pb_utils.InferenceResponse([result]))
        return found
"""
ON_HOST, ON_DEVICE = "True, (1, 0)", "False, (2, 0)"


RENAMED = """

def renamed(tensor):
    if tensor.is_cpu():
        return pb_utils.Tensor("IN", tensor.as_numpy())
    return pb_utils.Tensor.from_dlpack("IN", tensor)

"""

LARGE = np.arange(30_000, dtype=np.float32)


class GpuModels(Models):
    """Writes models on GPUs."""

    def on_gpu(self, name: str, source: str, device: int = 0, config: str = "") -> None:
        text = CONFIG % "python" + config + ON_GPU % device
        self.write(name, text, "1/model.py", f"DEVICE = {device}\n" + HEAD + RENAMED + source)

    def plus(self, group: str = ON_GPU % 0, name: str = "plus") -> None:
        self.write(name, CONFIG % "plus" + group, "backend.py", PLUS_ONE)

    def write(self, name: str, config: str, file: str, source: str) -> None:
        (self.path / name / "1").mkdir(parents=True)
        (self.path / name / "config.pbtxt").write_text(config)
        (self.path / name / file).write_text(source)


def gpu_models(path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuModels:
    """Return models in this folder, for a server with two GPUs."""
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv(NVML_VARIABLE, "tests.fake_cuda.nvml")
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    return GpuModels(path)


def copies(server: Served, name: str) -> int:
    """Return how many tensors the workers of a model have copied."""
    statistics: Any = server.kernel.catalog.resolve(name).statistics
    return int(statistics.copied_tensors)


def worker_of(server: Served, name: str) -> int:
    (instance,) = server.kernel.catalog.resolve(name).instances.serving
    pid: int = instance._session.pid  # type: ignore[attr-defined]
    return pid


#: Doubles its input five times, by calls of `add_sub`: only the first one has its inputs on the host.
DOUBLES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            for number in range(5):
                if tensor.is_cpu():
                    inputs = [pb_utils.Tensor(name, tensor.as_numpy()) for name in "AB"]
                else:
                    inputs = [pb_utils.Tensor.from_dlpack(name, tensor) for name in "AB"]
                call = pb_utils.InferenceRequest(
                    model_name="add_sub", requested_output_names=["X"], inputs=inputs
                )
                response = call.exec()
                assert not response.has_error(), response.error().message()
                (tensor,) = response.output_tensors()
                assert not tensor.is_cpu(), number
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUT", tensor)]))
        return found
"""


@contextlib.contextmanager
def server_on_fakes(root: Path, site: str) -> Iterator[ServerProcess]:
    """Serve `root`/models and the model `doubles` on the fake CUDA. Each process of the server runs `site` first."""
    write_doubles(root / "models")
    (root / "sitecustomize.py").write_text(site)
    tree = str(Path(__file__).parents[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(root), tree)))
        patch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
        with ServerProcess(root / "models") as running:
            yield running


def write_doubles(repository: Path) -> None:
    """Write the model `doubles`, for `doubled`."""
    (repository / "doubles/1").mkdir(parents=True)
    (repository / "doubles/config.pbtxt").write_text(
        'backend: "python"\n'
        'input [{ name: "IN" data_type: TYPE_FP32 dims: [-1, -1] }]\n'
        'output [{ name: "OUT" data_type: TYPE_FP32 dims: [-1, -1] }]\n' + ON_GPU % 0
    )
    (repository / "doubles/1/model.py").write_text(DOUBLES)


def doubled(server: ServerProcess, count: int) -> None:
    """Let `doubles` call `add_sub`, whose rows have `count` elements. Tensors between them stay on the GPU."""
    before = copies_of(server, "add_sub")
    with tritonclient.http.InferenceServerClient(server.url) as client:
        values = np.arange(count, dtype=np.float32).reshape(1, count)
        given = tritonclient.http.InferInput("IN", [1, count], "FP32").set_data_from_numpy(values)
        assert np.array_equal(client.infer("doubles", [given]).as_numpy("OUT"), values * 32)
    # Only of the first call, whose two inputs are the same memory of the host: the second one is read into a copy, and
    # they come to the GPU in one copy or in two.
    assert 1 <= copies_of(server, "add_sub") - before <= 3
