"""Calls between models on GPUs, over a CUDA of POSIX shared memory (`tests/fake_cuda`): no GPU is needed.

The streams of the fake do nothing before they are waited for, so that a missing wait gives old bytes.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.helper.device_tasks import NVML_VARIABLE
from shm.cuda import BINDINGS_VARIABLE
from tests.end_to_end.calling_models import HEAD, Models, Served, until
from tests.end_to_end.test_gpu_workers import PLUS_ONE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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

#: Calls `plus` twice, which adds 1 each time. What it gets is on its GPU, small or large.
CALLER = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            tensor = given(request)
            for number in range(2):
                response = call("plus", renamed(tensor)).exec()
                assert not response.has_error(), response.error().message()
                (tensor,) = response.output_tensors()
                assert not tensor.is_cpu(), number
                assert tensor.__dlpack_device__() == (2, DEVICE)
            found.append(pb_utils.InferenceResponse([tensor]))
        return found
"""

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


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuModels:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv(NVML_VARIABLE, "tests.fake_cuda.nvml")
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    return GpuModels(tmp_path)


def copies(server: Served, name: str) -> int:
    """Return how many tensors the workers of a model have copied."""
    statistics: Any = server.kernel.catalog.resolve(name).statistics
    return int(statistics.copied_tensors)


def worker_of(server: Served, name: str) -> int:
    (instance,) = server.kernel.catalog.resolve(name).instances.serving
    pid: int = instance._session.pid  # type: ignore[attr-defined]
    return pid


def test_results_and_inputs_of_calls_stay_on_the_gpu(models: GpuModels) -> None:
    models.on_gpu("caller", CALLER)
    models.plus()
    with models.served() as server:

        async def run() -> None:
            for values in (LARGE, LARGE[:3], LARGE * 2):
                found = await server.ask("caller", values)
                assert np.array_equal(found, values + 2)
            # The first input comes from the host, the last output goes there.
            assert copies(server, "plus") == 3
            assert copies(server, "caller") == 3

        server.run(run)
