from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from onnx import TensorProto

from backends.worker.devices.tensors import DeviceArray
from kernel.errors import InvalidArgument, Unavailable, Unsupported
from shm.tensor import RequestedOutput
from tests.backends.add_sub_batch import floats
from tests.backends.device_lab import DeviceLab, at
from tests.backends.onnxruntime.sessions_on_device import CUDA, FLOAT, TENSORS, lab, loaded, models, ort
from tests.fake_onnxruntime import FakeOnnxRuntime

if TYPE_CHECKING:
    from tests.backends.onnxruntime.conftest import OnnxModels

__all__ = ["lab", "models", "ort"]

CPU = "CPUExecutionProvider"


def test_the_session_computes_on_the_stream_of_its_instance(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    backend = loaded(lab, models)
    assert backend.device_inputs
    assert ort.preloaded == 1
    assert ort.sessions[0].options == {
        CUDA: {
            "device_id": "0",
            "has_user_compute_stream": "1",
            "user_compute_stream": str(lab.instance_device.stream),
        },
        CPU: {},
    }


def test_a_batch_is_gathered_on_the_device_and_its_outputs_stay_there(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    backend = loaded(lab, models)
    requests = [lab.request({"A": floats(rows, 4), "B": floats(rows, 4) + rows}) for rows in (1, 3)]
    backend.execute(requests, lab.timings)
    for rows, request in zip((1, 3), requests, strict=True):
        assert np.array_equal(lab.outputs(request)["X"], floats(rows, 4) * 2 + rows)
        assert np.array_equal(lab.outputs(request)["Y"], np.full((rows, 4), -rows, np.float32))
    assert isinstance(lab.given["X"], DeviceArray)


def test_inputs_and_outputs_in_regions_are_used_where_they_are(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    backend = loaded(lab, models)
    a, b = floats(2, 4), floats(2, 4) * 3
    target = lab.on_device(np.zeros((2, 4), np.float32))
    lab.regions[7] = target, 32
    request = lab.request({}, outputs=["X"])
    request.inputs.extend([lab.device_input("A", a), lab.device_input("B", b)])  # type: ignore[list-item]
    span: Any = SimpleNamespace(lease=SimpleNamespace(region_number=7), offset=0, byte_size=32)
    request.ref.outputs[0] = RequestedOutput("X", span=span)
    backend.execute([request], lab.timings)
    assert ort.sessions[0].bound == [{view.name: view.address for view in request.inputs}]  # type: ignore[attr-defined]
    assert lab.given["X"].address == target
    assert np.array_equal(at(target, (2, 4)), a + b)
    assert lab.instance_device.copies == 1  # of the lab, which reads the output


def test_a_wrong_shape_in_the_model_file_costs_only_the_destination(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    models.write([("Add", ["A", "B"], ["X"])], [("A", FLOAT, ["N", 4]), ("B", FLOAT, [1, 1])], [("X", FLOAT, ["N", 4])])
    config = {
        "max_batch_size": 0,
        "input": [{**TENSORS[0], "dims": [-1, 4]}, {**TENSORS[1], "dims": [1, 1]}],
        "output": [{**TENSORS[2], "dims": [-1, 4]}],
    }
    backend = loaded(lab, models, **config)
    request = lab.request({"A": floats(2, 4), "B": np.ones((1, 1), np.float32)})
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["X"], floats(2, 4) + 1)


def test_strings_are_bound_on_the_host(lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime) -> None:
    models.write_unary("Identity", TensorProto.STRING, ["N"], ["N"])
    string = {"data_type": "TYPE_STRING", "dims": [-1]}
    config = {"max_batch_size": 0, "input": [{"name": "A", **string}], "output": [{"name": "X", **string}]}
    backend = loaded(lab, models, **config)
    request = lab.request({"A": np.array([b"one", b"two"], dtype=object)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["X"].tolist() == ["one", "two"]


def test_the_model_for_the_capability_of_the_gpu_is_loaded(
    lab: DeviceLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    major, minor = lab.instance_device.cuda.properties(0).capability
    models.file.rename(models.file.with_name("special.onnx"))
    loaded(lab, models, cc_model_filenames={f"{major}.{minor}": "special.onnx", "1.0": "other.onnx"})
    assert len(ort.sessions) == 1
    with pytest.raises(InvalidArgument, match="is outside the folder of model 'model'"):
        loaded(lab, models, cc_model_filenames={f"{major}.{minor}": "../../x.onnx"})


def test_a_session_without_cuda_is_an_error_and_not_slow(
    lab: DeviceLab, models: OnnxModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.onnxruntime.session.ort", FakeOnnxRuntime(failing=(CUDA,)))
    with pytest.raises(Unavailable, match="ONNX Runtime cannot use CUDA and would compute on the CPU: "):
        loaded(lab, models)
    monkeypatch.setattr("backends.onnxruntime.session.ort", FakeOnnxRuntime((CPU,)))
    with pytest.raises(Unsupported, match=r"has only CPU.*; it is installed with: pip install .*\[gpu\]"):
        loaded(lab, models)


def test_tensorrt_that_cannot_be_loaded_is_left_out_with_a_warning(
    lab: DeviceLab, models: OnnxModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorrt = "TensorrtExecutionProvider"
    fake = FakeOnnxRuntime((tensorrt, CUDA, CPU), failing=(tensorrt,))
    monkeypatch.setattr("backends.onnxruntime.session.ort", fake)
    accelerators = {"gpu_execution_accelerator": [{"name": "tensorrt", "parameters": {"precision_mode": "FP16"}}]}
    loaded(lab, models, optimization={"execution_accelerators": accelerators})
    assert list(fake.sessions[0].options) == [tensorrt, CUDA, CPU]
    assert fake.sessions[0].options[tensorrt]["trt_fp16_enable"] == "True"
    ((level, text),) = lab.logged
    assert level == "WARNING"
    assert text.startswith("the 'tensorrt' accelerator of model 'model' has no effect")
