"""`naiad infer`: arguments become inputs of a request."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernel.tools.client import ClientError
from kernel.tools.infer_arguments import build_inputs, choose_shape, read_value, split_arguments

if TYPE_CHECKING:
    from pathlib import Path

METADATA = {
    "name": "m",
    "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "OUT"}, {"name": "SCORES"}],
}


def metadata(datatype: str, shape: list[int]) -> dict[str, Any]:
    return {"name": "m", "inputs": [{"name": "X", "datatype": datatype, "shape": shape}], "outputs": []}


@pytest.mark.parametrize(
    ("text", "datatype", "value"),
    [
        ("3", "INT32", 3),
        ("[1, 2]", "FP32", [1, 2]),
        ("true", "BOOL", True),
        ("abc", "INT32", "abc"),
        ('"a b"', "BYTES", "a b"),
        ("plain words", "BYTES", "plain words"),
        ("[INST] not JSON", "BYTES", "[INST] not JSON"),
        ('["a", "b"]', "BYTES", ["a", "b"]),
        ("2", "BYTES", "2"),
        ("true", "BYTES", "true"),
        ("null", "BYTES", "null"),
        ('{"role": "user"}', "BYTES", '{"role": "user"}'),
        ("", "BYTES", ""),
        ("[" * 100_000, "BYTES", "[" * 100_000),
    ],
)
def test_a_value_is_json_or_the_text_itself(text: str, datatype: str, value: Any) -> None:
    assert read_value(text, datatype) == value


@pytest.mark.parametrize(
    ("dims", "own", "count", "shape"),
    [
        ([-1, 4], [1, 4], 4, [1, 4]),
        ([-1, 4], [4], 4, [1, 4]),
        ([-1, 2, 2], [4], 4, [1, 2, 2]),
        ([-1, 8], [16], 16, [2, 8]),
        ([1], [], 1, [1]),
        ([-1], [], 1, [1]),
        ([], [], 1, []),
        ([], [1], 1, []),
        ([-1], [0], 0, [0]),
        ([-1, 4], [0], 0, [0, 4]),
        ([-1, -1], [3], 3, [1, 3]),
        ([-1, 4], [3], 3, None),
        ([16], [3], 3, None),
        ([4], [0], 0, None),
    ],
)
def test_the_shape_is_that_of_the_value_or_is_derived_from_the_model(
    dims: list[int], own: list[int], count: int, shape: list[int] | None
) -> None:
    assert choose_shape(dims, own, count) == shape


def test_the_error_of_a_wrong_input_lists_the_inputs_of_the_model() -> None:
    with pytest.raises(ClientError, match=r"has no input 'X'; it takes IN \(FP32 \[-1, 4\]\)"):
        build_inputs(METADATA, {}, {"X": "1"})
    with pytest.raises(ClientError, match=r"takes IN .* give each as NAME=VALUE, NAME=@FILE.npy or NAME=@random$"):
        build_inputs(METADATA, {}, {})
    with pytest.raises(ClientError, match=r"the value given has shape \[3\]"):
        build_inputs(METADATA, {}, {"IN": "[1, 2, 3]"})


def test_an_input_may_be_missing_only_if_it_is_optional() -> None:
    two = {"name": "m", "inputs": [{"name": name, "datatype": "INT8", "shape": [1]} for name in "AB"]}
    with pytest.raises(ClientError, match="; B is missing$"):
        build_inputs(two, {"input": [{"name": "A"}, {"name": "B"}]}, {"A": "1"})
    config = {"input": [{"name": "A", "optional": True}, {"name": "B", "optional": True}]}
    assert [tensor.name for tensor in build_inputs(two, config, {"A": "1"})] == ["A"]
    assert build_inputs(two, config, {}) == []
    assert build_inputs({"name": "m", "inputs": []}, {}, {}) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["IN"], "'IN' is not of the form NAME=VALUE, NAME=@FILE.npy or NAME=@random"),
        (["IN=1", "IN=2"], "input 'IN' is given twice: several values are one list, 'IN=[1,2]'"),
    ],
)
def test_arguments_that_are_no_inputs_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ClientError) as caught:
        split_arguments(arguments)
    assert str(caught.value) == message


def test_the_value_of_an_argument_may_have_equals_signs() -> None:
    assert split_arguments(["A=b=c", "B="]) == {"A": "b=c", "B": ""}


@pytest.mark.parametrize("text", ["[[1,2],[3]]", "[[1],[2,3]]", "[1,[2]]", "[[1],2]"])
def test_lists_of_different_lengths_are_no_tensor(text: str) -> None:
    with pytest.raises(ClientError, match="input 'X' is no tensor: its lists have different lengths"):
        build_inputs(metadata("FP32", [-1, -1]), {}, {"X": text})


def test_an_element_that_does_not_fit_is_named_with_the_input() -> None:
    with pytest.raises(ClientError, match="^input 'X' is INT8: 300 is not between -128 and 127$"):
        build_inputs(metadata("INT8", [-1]), {}, {"X": "[1,300]"})


@pytest.mark.parametrize(
    ("datatype", "array", "raw"),
    [
        ("FP16", np.array([1.5, -2], np.float16), struct.pack("<2e", 1.5, -2)),
        ("FP32", np.array([[1, 2]], np.float64), struct.pack("<2f", 1, 2)),
        ("BF16", np.array([1.5], np.float32), b"\xc0\x3f"),
        ("BOOL", np.array([True, False]), b"\1\0"),
        ("INT64", np.array([2**40], np.int64), struct.pack("<q", 2**40)),
        ("BYTES", np.array([b"\xff"]), b"\1\0\0\0\xff"),
        ("BYTES", np.array(["é"]), b"\2\0\0\0\xc3\xa9"),
    ],
)
def test_a_numpy_file_becomes_the_models_datatype(tmp_path: Path, datatype: str, array: Any, raw: bytes) -> None:
    np.save(tmp_path / "x.npy", array)
    [tensor] = build_inputs(metadata(datatype, [-1]), {}, {"X": f"@{tmp_path}/x.npy"})
    assert (tensor.shape, tensor.raw) == ([array.size], raw)


def test_a_file_that_is_no_array_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "two.npz", a=1, b=2)
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    for name in ("missing.npy", "empty.npy", "two.npz", "objects.npy"):
        with pytest.raises(ClientError, match=f"cannot read '{tmp_path}/{name}' as a NumPy file: "):
            build_inputs(metadata("FP32", [-1]), {}, {"X": f"@{tmp_path}/{name}"})
