"""ONNX Runtime's sessions on a device, on the fakes of ONNX Runtime and of CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from onnx import TensorProto

from backends.onnxruntime.backend import OnnxRuntimeBackend
from tests.backends.device_lab import DeviceLab
from tests.backends.onnxruntime.conftest import OnnxModels
from tests.fake_onnxruntime import FakeOnnxRuntime

if TYPE_CHECKING:
    from pathlib import Path

CUDA = "CUDAExecutionProvider"

FLOAT = TensorProto.FLOAT

TENSORS = [{"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in "ABXY"]

CONFIG = {"name": "model", "max_batch_size": 8, "input": TENSORS[:2], "output": TENSORS[2:]}


@pytest.fixture
def lab() -> DeviceLab:
    return DeviceLab()


@pytest.fixture
def models(tmp_path: Path, lab: DeviceLab) -> OnnxModels:
    models = OnnxModels(tmp_path, lab)
    values: dict[str, Any] = {name: (name, FLOAT, ["N", 4]) for name in "ABXY"}
    models.write(
        [("Add", ["A", "B"], ["X"]), ("Sub", ["A", "B"], ["Y"])],
        [values["A"], values["B"]], [values["X"], values["Y"]],
    )  # fmt: skip
    return models


@pytest.fixture
def ort(monkeypatch: pytest.MonkeyPatch) -> FakeOnnxRuntime:
    fake = FakeOnnxRuntime()
    monkeypatch.setattr("backends.onnxruntime.session.ort", fake)
    return fake


def loaded(lab: DeviceLab, models: OnnxModels, **more: Any) -> OnnxRuntimeBackend:
    backend = OnnxRuntimeBackend(lab)
    backend.load(models.arguments({**CONFIG, **more}, kind="GPU", instance_name="model_0"))
    return backend
