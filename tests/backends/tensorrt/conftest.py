"""TensorRT models of the fake TensorRT, on the fake CUDA, in a temporary model repository."""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shm.cuda
from backends.base import ModelArguments
from backends.tensorrt.backend import TensorRtBackend
from backends.tensorrt.library import MODULE_VARIABLE
from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.tensors import DeviceArray
from backends.worker.memory import AttachedRegions
from shm.arrays import NUMPY_TYPES
from shm.cuda import BINDINGS_VARIABLE
from tests.fake_cuda import runtime
from tests.fake_tensorrt.plan import encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shm.arrays import Array
    from shm.cuda import Cuda
    from tests.backends.conftest import Lab
    from tests.fake_tensorrt.plan import PlanFile


def put_on_device(lab: Any, device: InstanceDevice) -> None:
    """Let a lab have a device: it copies outputs from there as a worker does, when the stream is waited for."""
    respond = lab.respond

    def respond_from_device(request: Any, outputs: Any, parameters: Any, final: bool) -> None:
        for output in outputs:
            if isinstance(output.array, DeviceArray):
                dtype = NUMPY_TYPES["UINT16" if output.datatype == "BF16" else output.datatype]
                copy: Array = np.full(output.array.shape, 99).astype(dtype)
                device.copy_to(output.array, copy.reshape(-1).view(np.uint8).data)
                output.array = _Uncopied(copy)
        respond(request, outputs, parameters, final)

    outputs = lab.outputs

    def outputs_after_wait(request: Any) -> Any:
        if device.pending:
            device.synchronize()
        return outputs(request)

    lab.respond, lab.outputs = respond_from_device, outputs_after_wait
    lab.__class__ = type("DeviceLab", (type(lab),), {"device": device})


class _Uncopied:
    """An array that the lab does not copy: its elements arrive later."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def copy(self) -> Array:
        return self._array


class Plans:
    """Writes and loads a model called `model`."""

    def __init__(self, root: Path, lab: Lab, device: InstanceDevice) -> None:
        self.dir = root / "model"
        self.file = self.dir / "1" / "model.plan"
        self.file.parent.mkdir(parents=True)
        self.host: Any = lab
        put_on_device(lab, device)

    def write(self, plan: PlanFile, name: str = "model.plan") -> None:
        (self.file.parent / name).write_bytes(encode(plan))

    def arguments(self, config: dict[str, Any] | None = None, **more: Any) -> ModelArguments:
        group = {"name": "model", "kind": "KIND_GPU", "gpus": [0]}
        return ModelArguments({"name": "model", "instance_group": [group], **(config or {})}, self.dir, 1, **more)

    def completed(self, config: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        return TensorRtBackend(self.host).complete(self.arguments(config, **more))

    def loaded(self, config: dict[str, Any] | None = None, **more: Any) -> TensorRtBackend:
        """Complete `config`, load the model, and return its backend."""
        backend = TensorRtBackend(self.host)
        filled = backend.complete(self.arguments(config, **more))
        backend.load(self.arguments(filled, instance_name="model_0", kind="GPU", **more))
        return backend


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Let this process use the fake CUDA and the fake TensorRT, and give their devices."""
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv(MODULE_VARIABLE, "tests.fake_tensorrt")
    monkeypatch.setattr(shm.cuda, "cuda", functools.cache(shm.cuda.cuda.__wrapped__))
    found = shm.cuda.cuda()
    monkeypatch.setattr("backends.tensorrt.backend.cuda", lambda: found)
    runtime.launches.clear()
    yield found
    gc.collect()  # blocks free their memory, which is a file for each


@pytest.fixture
def device(fake_gpu: Cuda) -> InstanceDevice:
    return InstanceDevice(fake_gpu, 0, AttachedRegions())


@pytest.fixture
def plans(tmp_path: Path, lab: Lab, device: InstanceDevice) -> Plans:
    return Plans(tmp_path, lab, device)
