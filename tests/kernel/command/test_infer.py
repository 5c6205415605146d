"""`naiad infer`: arguments become tensors, and a response becomes lines."""

from __future__ import annotations

from typing import Any

import pytest

from kernel.command.infer import (
    ClientError,
    base_url,
    build_inputs,
    build_outputs,
    choose_shape,
    format_outputs,
    read_value,
)

METADATA = {
    "name": "m",
    "inputs": [{"name": "IN", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "OUT"}, {"name": "SCORES"}],
}


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("[::1]:8000/", "http://[::1]:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("https://models.example/triton/", "https://models.example/triton"),
    ],
)
def test_a_host_and_port_become_a_url(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("[1, 2]", [1, 2]), ('"a b"', "a b"), ("plain words", "plain words"), ("true", True)]
)
def test_a_value_is_json_or_the_text_itself(text: str, value: Any) -> None:
    assert read_value(text) == value


@pytest.mark.parametrize(
    ("dims", "value", "shape"),
    [
        ([-1, 4], [[1, 2, 3, 4]], [1, 4]),
        ([-1, 4], [1, 2, 3, 4], [1, 4]),
        ([-1, 2, 2], [1, 2, 3, 4], [1, 2, 2]),
        ([-1, 8], list(range(16)), [2, 8]),
        ([1], 5, [1]),
        ([-1], "word", [1]),
        ([-1, -1], [1, 2, 3], [1, 3]),
        ([-1, 4], [1, 2, 3], None),
        ([16], [1, 2, 3], None),
    ],
)
def test_the_shape_is_that_of_the_value_or_is_derived_from_the_model(
    dims: list[int], value: Any, shape: list[int] | None
) -> None:
    count = (
        len(value)
        if isinstance(value, list) and not isinstance(value[0], list)
        else 4
        if isinstance(value, list)
        else 1
    )
    assert choose_shape(dims, value, count) == shape


def test_the_error_of_a_wrong_input_lists_the_inputs_of_the_model() -> None:
    with pytest.raises(ClientError, match=r"has no input 'X'; it takes IN \(FP32 \[-1, 4\]\)"):
        build_inputs(METADATA, {"X": 1})
    with pytest.raises(ClientError, match=r"takes IN"):
        build_inputs(METADATA, {})
    with pytest.raises(ClientError, match=r"the value given has shape \[3\]"):
        build_inputs(METADATA, {"IN": [1, 2, 3]})


def test_outputs_with_labels_or_a_number_are_requested_as_classes() -> None:
    config = {"output": [{"name": "SCORES", "label_filename": "labels.txt"}]}
    assert build_outputs(METADATA, config, 0) == [
        {"name": "OUT"},
        {"name": "SCORES", "parameters": {"classification": 3}},
    ]
    assert build_outputs(METADATA, {}, 5)[0] == {"name": "OUT", "parameters": {"classification": 5}}


def test_outputs_are_formatted_for_people() -> None:
    response = {
        "outputs": [
            {"name": "SUM", "datatype": "FP32", "shape": [1, 2], "data": [1.0, 0.25]},
            {"name": "LONG", "datatype": "INT32", "shape": [40], "data": list(range(40))},
            {"name": "BEST", "datatype": "BYTES", "shape": [2], "data": ["0.931724:6:six", "no class"]},
        ]
    }
    lines = list(format_outputs(response))
    assert lines[:2] == ["SUM  FP32 1x2", "  1, 0.25"]
    assert lines[4] == "  … and 8 more"
    assert lines[6].split() == ["six", "0.931724"]
    assert lines[7] == "  no class"
