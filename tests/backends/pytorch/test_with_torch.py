"""Models of every format, with PyTorch itself (`make test-torch`)."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel.errors import InternalError, InvalidArgument, Unavailable, Unsupported
from tests.backends.pytorch.conftest import config_of, tensors
from tests.backends.sklearn.makes_a_folder import MakesAFolder

torch: Any = pytest.importorskip("torch", reason="needs PyTorch: make test-torch")

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shm.arrays import Array
    from tests.backends.conftest import Lab
    from tests.backends.pytorch.conftest import TorchModels

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class AddSub(torch.nn.Module):  # type: ignore[misc]  # torch is not installed where mypy runs
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Dictionary(torch.nn.Module):  # type: ignore[misc]
    def forward(self, values: dict[str, torch.Tensor]) -> torch.Tensor:
        return values["X"] - values["Y"]


class Shout(torch.nn.Module):  # type: ignore[misc]
    def forward(self, words: list[str]) -> list[str]:
        found: list[str] = []
        for word in words:
            found.append(word + "!")  # noqa: PERF401 - TorchScript
        return found


class InPlace(torch.nn.Module):  # type: ignore[misc]
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a.add_(1)


class Nested(torch.nn.Module):  # type: ignore[misc]
    def forward(self, a: torch.Tensor, *, scale: torch.Tensor, more: dict[str, torch.Tensor]) -> Any:
        return {"product": a * scale, "list": [more["q"] + 1, a]}


class Identity(torch.nn.Module):  # type: ignore[misc]
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a.clone()


class Scalar(torch.nn.Module):  # type: ignore[misc]
    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a.sum()


class TensorList(torch.nn.Module):  # type: ignore[misc]
    def forward(self, a: torch.Tensor) -> list[torch.Tensor]:
        return [a, a]


def floats(*shape: int) -> Array:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def script(models: TorchModels, module: Any) -> None:
    torch.jit.script(module).save(str(models.file))


def export(models: TorchModels, module: Any, arguments: tuple[Any, ...], **more: Any) -> None:
    torch.export.save(torch.export.export(module, arguments, **more), models.file.with_name("model.pt2"))


ADD_SUB = config_of(tensors("INPUT__0", "INPUT__1", dims=[4]), tensors("OUTPUT__0", "OUTPUT__1", dims=[4]), batch=8)


# ---- TorchScript ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (("INPUT__0", "INPUT__1"), ("OUTPUT__0", "OUTPUT__1")),
        (("INPUT__1", "INPUT__0"), ("OUTPUT__1", "OUTPUT__0")),
        (("b", "a"), ("OUTPUT__1", "OUTPUT__0")),
        (("first", "second"), ("sum", "difference")),
    ],
)
def test_names_say_which_argument_and_result_a_tensor_is(
    lab: Lab, models: TorchModels, inputs: tuple[str, str], outputs: tuple[str, str]
) -> None:
    script(models, AddSub())
    backend = models.loaded(config_of(tensors(*inputs, dims=[4]), tensors(*outputs, dims=[4])))
    swapped = inputs[0] in ("INPUT__1", "b")
    a, b = floats(4), floats(4) * 3
    request = lab.request(dict(zip(inputs, (b, a) if swapped else (a, b), strict=True)))
    backend.execute([request], lab.timings)
    found = lab.outputs(request)
    swapped = outputs[0] == "OUTPUT__1"
    assert np.array_equal(found[outputs[swapped]], a + b)
    assert np.array_equal(found[outputs[not swapped]], a - b)


def test_a_batch_is_one_call_and_every_request_gets_its_rows(lab: Lab, models: TorchModels) -> None:
    script(models, AddSub())
    backend = models.loaded(ADD_SUB)
    requests = [lab.request({"INPUT__0": floats(rows, 4), "INPUT__1": floats(rows, 4) + rows}) for rows in (1, 3, 2)]
    backend.execute(requests, lab.timings)
    for rows, request in zip((1, 3, 2), requests, strict=True):
        assert np.array_equal(lab.outputs(request)["OUTPUT__0"], floats(rows, 4) * 2 + rows)
        assert np.array_equal(lab.outputs(request)["OUTPUT__1"], np.full((rows, 4), -rows, np.float32))


def test_a_dictionary_of_tensors_has_the_names_of_the_inputs(lab: Lab, models: TorchModels) -> None:
    script(models, Dictionary())
    backend = models.loaded(config_of(tensors("Y", "X"), tensors("OUTPUT__0")))
    request = lab.request({"X": floats(3) * 5, "Y": floats(3)})
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["OUTPUT__0"], floats(3) * 4)


def test_strings_are_lists_in_the_model(lab: Lab, models: TorchModels) -> None:
    script(models, Shout())
    backend = models.loaded(
        config_of(tensors("words", datatype="STRING"), tensors("loud", datatype="STRING", dims=[-1]))
    )
    request = lab.request({"words": np.array([b"a", "ü".encode(), b""], dtype=object)})
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["loud"].tolist() == ["a!", "ü!", "!"]
    wrong = lab.request({"words": np.array([b"\xff"], dtype=object)})
    with pytest.raises(InvalidArgument, match="input 'words' has a string that is not UTF-8"):
        backend.execute([wrong], lab.timings)


def test_strings_of_a_batch_are_one_list_of_all_rows(lab: Lab, models: TorchModels) -> None:
    script(models, Shout())
    one = {"data_type": "TYPE_STRING", "dims": [1], "reshape": {"shape": []}}
    backend = models.loaded(config_of([{"name": "words", **one}], [{"name": "loud", **one}], batch=4))
    requests = [lab.request({"words": np.array(words, dtype=object)}) for words in ([[b"a"]], [[b"b"], [b"c"]])]
    backend.execute(requests, lab.timings)
    assert [lab.outputs(request)["loud"].tolist() for request in requests] == [[["a!"]], [["b!"], ["c!"]]]


def test_a_model_that_changes_its_input_does_not_change_memory_of_a_client(lab: Lab, models: TorchModels) -> None:
    script(models, InPlace())
    backend = models.loaded(config_of(tensors("a"), tensors("x")))
    request = lab.request({"a": floats(3)}, volatile=True)
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["x"], floats(3) + 1)
    assert bytes(request.inputs[0].raw()) == floats(3).tobytes()


def test_an_input_of_a_client_is_not_copied_for_a_model_that_leaves_it_alone(lab: Lab, models: TorchModels) -> None:
    script(models, AddSub())
    backend = models.loaded(ADD_SUB)
    assert backend._model is not None
    assert not backend._model._runner.changes_inputs
    request = lab.request({"INPUT__0": floats(1, 4), "INPUT__1": floats(1, 4)}, volatile=True)
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["OUTPUT__0"], floats(1, 4) * 2)


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64]
)
def test_every_datatype_comes_back_as_it_went(lab: Lab, models: TorchModels, dtype: Any) -> None:
    script(models, Identity())
    array = np.array([0, 1, 1, 0], dtype)
    request = lab.request({"a": array})
    name = request.inputs[0].datatype
    backend = models.loaded(config_of(tensors("a", datatype=name), tensors("x", datatype=name)))
    backend.execute([request], lab.timings)
    assert lab.outputs(request)["x"].dtype == dtype
    assert np.array_equal(lab.outputs(request)["x"], array)


def test_bf16_and_empty_tensors_come_back_as_they_went(lab: Lab, models: TorchModels) -> None:
    script(models, Identity())
    backend = models.loaded(config_of(tensors("a", datatype="BF16"), tensors("x", datatype="BF16")))
    for array in (np.array([0x3F80, 0x4000], np.uint16), np.array([], np.uint16)):
        request = lab.request({"a": array}, bf16=["a"])
        backend.execute([request], lab.timings)
        assert lab.datatypes(request) == {"x": "BF16"}
        assert np.array_equal(lab.outputs(request)["x"], array)


def test_wrong_results_have_tritons_texts(lab: Lab, models: TorchModels) -> None:
    script(models, Scalar())
    backend = models.loaded(config_of(tensors("a"), tensors("x")))
    with pytest.raises(InvalidArgument, match="output 'x' is a scalar which is not supported."):
        backend.execute([lab.request({"a": floats(3)})], lab.timings)
    backend = models.loaded(config_of(tensors("a"), tensors("x", datatype="INT64")))
    with pytest.raises(InvalidArgument) as wrong:
        backend.execute([lab.request({"a": floats(3)})], lab.timings)
    assert str(wrong.value) == "configuration expects datatype TYPE_INT64 for output 'x', model provides TYPE_FP32"
    backend = models.loaded(config_of(tensors("a"), tensors("x__1")))
    with pytest.raises(InvalidArgument) as missing:
        backend.execute([lab.request({"a": floats(3)})], lab.timings)
    assert str(missing.value) == (
        "The output x__1 in the model configuration refers to an output index which doesn't exist. "
        "This model has 1 outputs"
    )
    script(models, TensorList())
    backend = models.loaded(config_of(tensors("a"), tensors("x")))
    with pytest.raises(InternalError, match=r"PyTorch execute failure: output must be of type Tensor or List\[str\]"):
        backend.execute([lab.request({"a": floats(3)})], lab.timings)


def test_only_the_wrong_request_of_a_batch_fails(lab: Lab, models: TorchModels) -> None:
    script(models, AddSub())
    names = tensors("a", "b", dims=[-1])
    backend = models.loaded(config_of(names, tensors("x", "y"), batch=4))
    good = lab.request({"a": floats(1, 4), "b": floats(1, 4)})
    wrong = lab.request({"a": floats(1, 4), "b": floats(1, 3)})
    backend.execute([good, wrong], lab.timings)
    assert np.array_equal(lab.outputs(good)["x"], floats(1, 4) * 2)
    assert lab.error(wrong).message.startswith("PyTorch execute failure: ")
    assert "The size of tensor a (4) must match the size of tensor b (3)" in lab.error(wrong).message


def test_settings_reach_pytorch(lab: Lab, models: TorchModels) -> None:
    script(models, AddSub())
    parameters = {
        "INTRA_OP_THREAD_COUNT": "1", "DISABLE_OPTIMIZED_EXECUTION": "true", "INFERENCE_MODE": "false",
        "ENABLE_JIT_PROFILING": "false", "ENABLE_JIT_EXECUTOR": "false", "ENABLE_TENSOR_FUSER": "false",
    }  # fmt: skip
    threads = torch.get_num_threads()
    try:
        backend = models.loaded(
            {**ADD_SUB, "parameters": {key: {"string_value": value} for key, value in parameters.items()}}
        )
        assert torch.get_num_threads() == 1
        assert not torch._C._get_graph_executor_optimize()
        request = lab.request({"INPUT__0": floats(1, 4), "INPUT__1": floats(1, 4)})
        backend.execute([request], lab.timings)
        assert np.array_equal(lab.outputs(request)["OUTPUT__0"], floats(1, 4) * 2)
    finally:
        torch.set_num_threads(threads)
        torch._C._set_graph_executor_optimize(True)
        torch._C._jit_set_profiling_mode(True)
        torch._C._jit_set_profiling_executor(True)
        torch._C._jit_set_texpr_fuser_enabled(True)


# ---- exported programs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (("ARGS[0]", "ARGS[1]"), ("RESULT[0]", "RESULT[1]")),
        (("a", "b"), ("OUTPUT__0", "OUTPUT__1")),
        (("INPUT__0", "INPUT__1"), ("sum", "difference")),
    ],
)
def test_an_exported_program_is_executed(
    lab: Lab, models: TorchModels, inputs: tuple[str, str], outputs: tuple[str, str]
) -> None:
    rows = torch.export.Dim("rows")
    # Two tensors: torch.export would make one input of the same one given twice.
    export(models, AddSub(), (torch.ones(2, 4), torch.ones(2, 4)), dynamic_shapes=({0: rows}, {0: rows}))
    backend = models.loaded(config_of(tensors(*inputs, dims=[4]), tensors(*outputs, dims=[4]), batch=8))
    requests = [lab.request({inputs[0]: floats(n, 4), inputs[1]: floats(n, 4) + 1}) for n in (1, 3)]
    backend.execute(requests, lab.timings)
    for n, request in zip((1, 3), requests, strict=True):
        assert np.array_equal(lab.outputs(request)[outputs[0]], floats(n, 4) * 2 + 1)
        assert np.array_equal(lab.outputs(request)[outputs[1]], np.full((n, 4), -1, np.float32))


def _sample_inputs(pickled: bytes) -> dict[str, bytes]:
    return {"data/sample_inputs/model.pt": pickled}


def _weight(pickled: bytes) -> dict[str, bytes]:
    entry = {"path_name": "weight_0", "is_param": True, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"layer.weight": entry}}).encode()
    return {"data/weights/weight_0": pickled, "data/weights/model_weights_config.json": config}


def _opaque_object(pickled: bytes) -> dict[str, bytes]:
    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    config = json.dumps({"config": {"x": entry}}).encode()
    return {"data/constants/opaque_obj_0": pickled, "data/constants/model_constants_config.json": config}


@pytest.mark.parametrize(("members", "archived"), [(_sample_inputs, True), (_weight, True), (_opaque_object, False)])
def test_nothing_of_a_pickle_in_an_exported_program_is_executed(
    models: TorchModels, tmp_path: Path, members: Callable[[bytes], dict[str, bytes]], archived: bool
) -> None:
    """`torch.export.load` opens pickles of examples, weights and constants, whatever objects they make."""
    export(models, Identity(), (torch.ones(3),))
    file = models.file.with_name("model.pt2")
    mark = tmp_path / "executed"
    content = io.BytesIO()
    if archived:
        torch.save(MakesAFolder(mark), content)
    else:
        pickle.dump(MakesAFolder(mark), content)
    replaced = members(content.getvalue())
    with zipfile.ZipFile(file) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    folder = next(iter(found)).partition("/")[0]
    found.update({f"{folder}/{name}": value for name, value in replaced.items()})
    with zipfile.ZipFile(file, "w") as archive:
        for name, value in found.items():
            archive.writestr(name, value)
    with pytest.raises(Unsupported, match="failed to load model 'model': 'model.pt2' has a pickle .* runs code"):
        models.loaded(config_of(tensors("a"), tensors("x")))
    assert not mark.exists()
    pickle.loads(pickle.dumps(MakesAFolder(mark)))
    assert mark.exists(), "the pickle is one that runs code"


def test_dictionaries_and_lists_of_an_exported_program_have_paths(lab: Lab, models: TorchModels) -> None:
    a, scale, q = torch.ones(3), torch.ones(3), torch.ones(3)
    export(models, Nested(), (a,), kwargs={"scale": scale, "more": {"q": q}})
    backend = models.loaded(
        config_of(
            tensors("KWARGSscale", "ARGS[0]", "KWARGS[more][q]", dims=[3]),
            tensors("RESULT[list][0]", "RESULT[product]", dims=[3]),
        )
    )
    request = lab.request({"ARGS[0]": floats(3), "KWARGSscale": floats(3) + 2, "KWARGS[more][q]": floats(3) * 7})
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["RESULT[product]"], floats(3) * (floats(3) + 2))
    assert np.array_equal(lab.outputs(request)["RESULT[list][0]"], floats(3) * 7 + 1)


def test_an_input_that_breaks_a_guard_of_the_program_is_an_error(lab: Lab, models: TorchModels) -> None:
    export(models, Identity(), (torch.ones(3),))
    backend = models.loaded(config_of(tensors("a"), tensors("x")))
    with pytest.raises(InternalError, match="PyTorch execute failure: Guard failed"):
        backend.execute([lab.request({"a": floats(4)})], lab.timings)


def test_a_number_among_the_arguments_of_a_program_is_refused(models: TorchModels) -> None:
    class Scaled(torch.nn.Module):  # type: ignore[misc]
        def forward(self, a: torch.Tensor, factor: int) -> torch.Tensor:
            return a * factor

    export(models, Scaled(), (torch.ones(3), 2))
    with pytest.raises(Unsupported, match="argument 'factor' of the exported program is not a tensor"):
        models.loaded(config_of(tensors("a", "factor"), tensors("x")))


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore")  # of its own code
def test_a_library_of_aotinductor_is_executed(lab: Lab, models: TorchModels) -> None:
    program = torch.export.export(AddSub(), (torch.ones(2, 4), torch.ones(2, 4)))
    try:
        torch._inductor.aoti_compile_and_package(program, package_path=str(models.file.with_name("model.pt2")))
    except Exception as error:
        pytest.skip(f"AOTInductor cannot compile here: {error}")
    config = config_of(tensors("ARGS[1]", "ARGS[0]", dims=[2, 4]), tensors("RESULT[0]", "RESULT[1]", dims=[2, 4]))
    backend = models.loaded(config)
    request = lab.request({"ARGS[0]": floats(2, 4) * 3, "ARGS[1]": floats(2, 4)})
    backend.execute([request], lab.timings)
    assert np.array_equal(lab.outputs(request)["RESULT[0]"], floats(2, 4) * 4)
    assert np.array_equal(lab.outputs(request)["RESULT[1]"], floats(2, 4) * 2)


# ---- files ----------------------------------------------------------------------------------


def test_a_missing_file_is_unavailable(models: TorchModels) -> None:
    with pytest.raises(Unavailable, match="unable to find '.*model.pt' for model instance 'model'"):
        models.loaded(ADD_SUB)


def test_a_pickle_is_refused_with_what_to_write_instead(models: TorchModels) -> None:
    torch.save(AddSub().state_dict(), models.file)
    with pytest.raises(Unsupported, match=r"'model.pt' was written by torch.save.* torch.export.save"):
        models.loaded(ADD_SUB)


def test_a_broken_file_is_an_error(models: TorchModels, tmp_path: Path) -> None:
    script(models, AddSub())
    models.file.write_bytes(models.file.read_bytes()[:300])
    with pytest.raises(InternalError, match="failed to load model 'model': 'model.pt' is neither TorchScript"):
        models.loaded(ADD_SUB)
