"""The backend with a fake PyTorch (`tests/fake_torch.py`); `test_with_torch.py` has the models of a real one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.pytorch import library
from backends.worker.devices.tensors import DeviceArray
from kernel.errors import InternalError, InvalidArgument, Unsupported
from tests.backends.device_lab import DeviceLab, at
from tests.backends.pytorch.conftest import TorchModels, config_of, tensors
from tests.fake_torch import FakeTorch, save

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends.conftest import Lab

ADD_SUB = config_of(tensors("a", "b", dims=[4]), tensors("OUTPUT__0", "OUTPUT__1", dims=[4]), batch=8)
AB = (("a", "TensorType"), ("b", "TensorType"))


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr("backends.pytorch.backend.load_torch", lambda: fake)
    return fake


def floats(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_a_batch_is_one_call_and_every_request_gets_its_rows(lab: Lab, models: TorchModels, torch: FakeTorch) -> None:
    save(models.file, "add_sub", *AB)
    backend = models.loaded(ADD_SUB)
    requests = [lab.request({"a": floats(rows, 4), "b": floats(rows, 4) + rows}) for rows in (1, 3)]
    backend.execute(requests, lab.timings)
    for rows, request in zip((1, 3), requests, strict=True):
        assert np.array_equal(lab.outputs(request)["OUTPUT__0"], floats(rows, 4) * 2 + rows)
        assert np.array_equal(lab.outputs(request)["OUTPUT__1"], np.full((rows, 4), -rows, np.float32))
    assert torch.modes == ["inference_mode", "inference_mode"]


def test_memory_of_a_client_is_copied_only_for_a_model_that_changes_its_inputs(
    lab: Lab, models: TorchModels, torch: FakeTorch
) -> None:
    save(models.file, "increment", AB[0], schemas=("aten::add_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)",))
    backend = models.loaded(config_of(tensors("a"), tensors("x")))
    request = lab.request({"a": floats(3)}, volatile=True)
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["x"], floats(3) + 1)
    assert bytes(request.inputs[0].raw()) == floats(3).tobytes()
    save(models.file, "increment", AB[0])  # it lies: NumPy finds out that it has got the client's memory itself
    backend = models.loaded(config_of(tensors("a"), tensors("x")))
    with pytest.raises(InternalError, match="PyTorch execute failure: .*read-only"):
        backend.execute([lab.request({"a": floats(3)}, volatile=True)], lab.timings)


def test_dictionaries_and_strings_are_what_the_model_takes(lab: Lab, models: TorchModels, torch: FakeTorch) -> None:
    save(models.file, "subtract", ("values", "DictType"))
    backend = models.loaded(config_of(tensors("Y", "X"), tensors("x")))
    request = lab.request({"X": floats(3) * 5, "Y": floats(3)})
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["x"], floats(3) * 4)
    save(models.file, "loud", ("words", "ListType"))
    backend = models.loaded(config_of(tensors("words", datatype="STRING"), tensors("x", datatype="STRING")))
    request = lab.request({"words": np.array([b"a", b"b"], dtype=object)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["x"].tolist() == ["a!", "b!"]


def test_parameters_are_set_in_pytorch(lab: Lab, models: TorchModels, torch: FakeTorch) -> None:
    save(models.file, "add_sub", *AB)
    parameters = {
        "INTRA_OP_THREAD_COUNT": "3", "INTER_OP_THREAD_COUNT": "2", "DISABLE_OPTIMIZED_EXECUTION": "true",
        "INFERENCE_MODE": "false", "DISABLE_CUDNN": "1", "ENABLE_JIT_PROFILING": "false", "ENABLE_NVFUSER": "true",
        "ENABLE_JIT_EXECUTOR": "true", "ENABLE_TENSOR_FUSER": "false", "ENABLE_WEIGHT_SHARING": "true",
    }  # fmt: skip
    models.loaded({**ADD_SUB, "parameters": {key: {"string_value": value} for key, value in parameters.items()}})
    assert torch.set == {
        "threads": 3, "interop_threads": 2, "_set_graph_executor_optimize": False, "_jit_set_profiling_mode": False,
        "_jit_set_profiling_executor": True, "_jit_set_texpr_fuser_enabled": False,
    }  # fmt: skip
    assert torch.modes == ["no_grad"]
    assert not torch.backends.cudnn.enabled
    assert [text for _, text in lab.logged] == [
        "parameter 'ENABLE_WEIGHT_SHARING' of model 'model' has no effect: every instance has its own process",
        "parameter 'ENABLE_NVFUSER' of model 'model' has no effect: PyTorch has no NvFuser any more",
    ]


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ({"INFERENCE_MODE": "perhaps"}, InvalidArgument, "failed to convert 'perhaps' to boolean"),
        ({"INTRA_OP_THREAD_COUNT": "two"}, InvalidArgument, "failed to convert 'two' to integral number"),
        ({"MODEL_INIT_LIBRARY": "a.so"}, Unsupported, "parameter 'MODEL_INIT_LIBRARY' of model 'model' is not"),
    ],
)
def test_wrong_parameters_are_refused(
    models: TorchModels, torch: FakeTorch, parameters: dict[str, str], error: type[Exception], text: str
) -> None:
    save(models.file, "add_sub", *AB)
    with pytest.raises(error, match=text):
        models.loaded({**ADD_SUB, "parameters": {key: {"string_value": value} for key, value in parameters.items()}})


def test_a_wrong_result_has_tritons_text(lab: Lab, models: TorchModels, torch: FakeTorch) -> None:
    save(models.file, "add_sub", *AB)
    backend = models.loaded(config_of(tensors("a", "b"), tensors("x", "y", datatype="INT64")))
    with pytest.raises(InvalidArgument) as wrong:
        backend.execute([lab.request({"a": floats(2), "b": floats(2)})], lab.timings)
    assert wrong.value.message == "configuration expects datatype TYPE_INT64 for output 'x', model provides TYPE_FP32"


def test_only_the_wrong_request_of_a_batch_fails_unless_the_model_has_sequences(
    lab: Lab, models: TorchModels, torch: FakeTorch
) -> None:
    save(models.file, "add_sub", *AB)
    config = config_of(tensors("a", "b", dims=[-1]), tensors("x", "y", dims=[-1]), batch=8)
    good, wrong = (lab.request({"a": floats(1, 4), "b": floats(1, width)}) for width in (4, 3))
    models.loaded(config).execute([good, wrong], lab.timings)
    assert np.array_equal(lab.outputs(good)["x"], floats(1, 4) * 2)
    assert lab.error(wrong).message.startswith("PyTorch execute failure: ")
    requests = [lab.request({"a": floats(1, 4), "b": floats(1, 3)}) for _ in range(2)]
    with pytest.raises(InternalError):
        models.loaded({**config, "sequence_batching": {}}).execute(requests, lab.timings)


def test_nothing_is_completed_as_in_triton(lab: Lab, models: TorchModels) -> None:
    from backends.pytorch.backend import PyTorchBackend

    config = {"name": "model", "max_batch_size": 2}
    assert PyTorchBackend(lab).complete(models.arguments(config)) == config
    assert lab.logged == [
        ("WARNING", "skipping model configuration auto-complete for 'model': not supported for pytorch backend")
    ]


def test_without_pytorch_the_error_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(Unsupported, match=r"needs PyTorch, which cannot be imported: .* '\.\[pytorch\]'"):
        library.load_torch()


# ---- on a GPU -------------------------------------------------------------------------------


def on_gpu(tmp_path: Path, *file: Any, **more: Any) -> tuple[DeviceLab, TorchModels]:
    lab = DeviceLab()
    models = TorchModels(tmp_path, lab)
    save(models.file, *file, **more)
    return lab, models


def test_on_a_gpu_inputs_and_outputs_stay_there(tmp_path: Path, torch: FakeTorch) -> None:
    lab, models = on_gpu(tmp_path, "add_sub", *AB)
    backend = models.loaded(ADD_SUB, kind="GPU")
    assert backend.device_inputs
    requests = [lab.request({"a": floats(rows, 4), "b": floats(rows, 4) + rows}) for rows in (1, 3)]
    backend.execute(requests, lab.timings)
    for rows, request in zip((1, 3), requests, strict=True):
        assert np.array_equal(lab.outputs(request)["OUTPUT__0"], floats(rows, 4) * 2 + rows)
        assert np.array_equal(lab.outputs(request)["OUTPUT__1"], np.full((rows, 4), -rows, np.float32))
    assert isinstance(lab.given["OUTPUT__0"], DeviceArray)


def test_an_input_in_a_region_on_a_gpu_is_read_where_it_is(tmp_path: Path, torch: FakeTorch) -> None:
    lab, models = on_gpu(tmp_path, "add_sub", *AB)
    backend = models.loaded(ADD_SUB, kind="GPU")
    request = lab.request({}, outputs=["OUTPUT__1"])
    request.inputs.extend(
        [lab.device_input("a", floats(2, 4) * 3), lab.device_input("b", floats(2, 4))]  # type: ignore[list-item]
    )
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["OUTPUT__1"], floats(2, 4) * 2)
    assert lab.instance_device.copies == 1  # of the lab, which reads the output


def test_a_region_on_a_gpu_is_copied_for_a_model_that_changes_its_inputs(tmp_path: Path, torch: FakeTorch) -> None:
    lab, models = on_gpu(tmp_path, "increment", AB[0], schemas=("aten::add_(Tensor(a!) self) -> Tensor(a!)",))
    config = config_of(tensors("a"), tensors("x"), parameters={"ENABLE_CACHE_CLEANING": {"string_value": "true"}})
    backend = models.loaded(config, kind="GPU")
    request = lab.request({})
    given = lab.device_input("a", floats(3))
    request.inputs.append(given)  # type: ignore[arg-type]
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["x"], floats(3) + 1)
    assert np.array_equal(at(given.address, [3]), floats(3))
    assert torch.set["empty_cache"]
