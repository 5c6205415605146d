"""What is read of model files: their formats and call specifications."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from backends.pytorch.model_file import FileFormat, find_model_file, flat_results, format_of, read_format
from backends.pytorch.naming import accepted_spelling, input_names, output_names
from kernel.errors import InternalError, InvalidArgument, Unavailable, Unsupported

if TYPE_CHECKING:
    from tests.backends.pytorch.conftest import TorchModels

LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}


def node(kind: str, *children: Any, keys: list[str] | None = None) -> dict[str, Any]:
    return {"type": f"builtins.{kind}", "context": json.dumps(keys), "children_spec": list(children)}


def spec(root: Any) -> str:
    return json.dumps([1, root])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["m/data.pkl", "m/code/a.py", "m/constants.pkl"], FileFormat.TORCHSCRIPT),
        (["m/archive_format", "m/models/model.json"], FileFormat.EXPORTED),
        (["serialized_exported_program.json", "version"], FileFormat.EXPORTED),
        (["m/archive_format", "m/data/aotinductor/model/x.so"], FileFormat.COMPILED),
    ],
)
def test_the_format_is_that_of_the_contents(names: list[str], expected: FileFormat) -> None:
    assert format_of(names, "model.pt", "m") is expected


def test_a_pickle_and_another_archive_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"'model.pt' was written by torch.save.* torch.jit.script"):
        format_of(["m/data.pkl", "m/version"], "model.pt", "m")
    with pytest.raises(Unsupported, match="'model.pt' is an archive, but not of torch.jit.save or torch.export.save"):
        format_of(["readme.txt"], "model.pt", "m")


def test_the_file_is_model_pt_else_model_pt2_else_the_named_one(models: TorchModels) -> None:
    with pytest.raises(Unavailable, match="unable to find '.*/1/model.pt' for model instance 'model'"):
        find_model_file(models.arguments())
    second, named = models.file.with_name("model.pt2"), models.file.with_name("net.pt")
    for path in (second, models.file):
        path.touch()
        assert find_model_file(models.arguments()) == path
    named.touch()
    assert find_model_file(models.arguments({"default_model_filename": "net.pt"})) == named
    assert find_model_file(models.arguments({"cc_model_filenames": {"9.0": "net.pt"}}), (9, 0)) == named
    with pytest.raises(InvalidArgument, match="is outside the folder of model 'model'"):
        find_model_file(models.arguments({"default_model_filename": "../../other/model.pt"}))
    with pytest.raises(InternalError, match="'model.pt' is neither TorchScript"):
        read_format(models.file, "model")


def test_inputs_and_outputs_are_called_by_their_paths() -> None:
    keywords = node("dict", LEAF, node("list", LEAF, LEAF), keys=["scale", "more"])
    root = node("tuple", node("tuple", LEAF, node("dict", LEAF, keys=["mask"])), keywords)
    assert input_names(spec(root)) == [
        "ARGS[0]", "ARGS[1][mask]", "KWARGS[scale]", "KWARGS[more][0]", "KWARGS[more][1]",
    ]  # fmt: skip
    assert output_names(spec(LEAF)) == ["RESULT"]
    assert output_names(spec(node("tuple", LEAF, LEAF))) == ["RESULT[0]", "RESULT[1]"]
    assert [accepted_spelling(name) for name in ("KWARGSscale", "KWARGS[more][0]", "KWARGS", "ARGS[0]")] == [
        "KWARGS[scale]", "KWARGS[more][0]", "KWARGS", "ARGS[0]",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "[2, {}]", "[1, []]", spec(LEAF), spec(node("tuple", LEAF)), "[1]"])
def test_an_unknown_call_specification_is_an_error(text: str) -> None:
    with pytest.raises(InternalError, match="the model file"):
        input_names(text)


def test_other_containers_are_refused() -> None:
    with pytest.raises(InternalError, match="outputs in a 'mine.Type'; tensors, tuples, lists and dictionaries are"):
        output_names(spec({"type": "mine.Type", "children_spec": [LEAF]}))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ([1.0], "output must be of type Tensor or List[str], received List[float]"),
        ({"x": 1}, "output must be of type Tensor, List[str] or Tuple containing one of these two types. It should not "
         "be a List / Dictionary of Tensors or a Scalar"),
        ((b"t", [2]), "output at index 1 must be of type Tensor or List[str], received List[int]"),
        ((b"t", 2), "Expected Tensor but got int"),
    ],
)  # fmt: skip
def test_results_that_are_no_tensors_are_refused(result: Any, text: str) -> None:
    with pytest.raises(ValueError) as refused:
        flat_results(result, lambda value: isinstance(value, bytes))
    assert str(refused.value) == text


def test_results_are_tensors_and_lists_of_strings() -> None:
    def is_tensor(value: Any) -> bool:
        return isinstance(value, bytes)

    assert flat_results(b"t", is_tensor) == [b"t"]
    assert flat_results(["a"], is_tensor) == [["a"]]
    assert flat_results((b"t", ["a"], []), is_tensor) == [b"t", ["a"], []]
