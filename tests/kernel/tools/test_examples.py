"""The first requests that an author is shown are right for the model."""

from __future__ import annotations

import json
import shlex

import pytest

from kernel.config.load import from_pbtxt
from kernel.config.spec import ModelSpec, model_spec
from kernel.serving.request import NO_SINK, Request
from kernel.serving.validation import validate
from kernel.tools.first_requests import example_inputs, example_lines
from protocols.http.json.tensor import decode_data
from shm.tensor import Tensor

OUTPUT = 'output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]'
NAME_AND_DIMS = 'name: "%s" data_type: TYPE_%s dims: [ %s ]'
SPECS = {
    "numbers": f"max_batch_size: 4 input [ {{ {NAME_AND_DIMS % ('IN', 'FP32', '-1, 2')} }} ]",
    "texts": "".join(
        f"input [ {{ {NAME_AND_DIMS % each} }} ]" for each in (("IN", "STRING", "-1"), ("B", "BOOL", "2"))
    ),
    "optional": "".join(
        f"input [ {{ {NAME_AND_DIMS % (name, 'INT8', '1')} {more} }} ]"
        for name, more in (("IN", ""), ("X", "optional: true"))
    ),
}


def spec(text: str) -> ModelSpec:
    return model_spec(from_pbtxt(f'name: "it" {text} {OUTPUT}'.encode(), ""))


@pytest.mark.parametrize("name", SPECS)
def test_the_inputs_are_those_of_the_model(name: str) -> None:
    expected = spec(SPECS[name])
    inputs = example_inputs(expected)
    assert inputs is not None
    tensors = [
        Tensor(
            each.name,
            each.datatype,
            each.shape,
            decode_data(each.name, each.datatype, json.dumps(each.data).encode(), len(each.data)),
        )
        for each in inputs
    ]
    validate(Request("it", tensors, NO_SINK), expected)


def test_the_lines_are_words_of_a_shell() -> None:
    client, curl = example_lines(spec(SPECS["numbers"]), "http://localhost:8000", "naiad")
    assert shlex.split(client) == ["naiad", "infer", "it", "IN=[1,2,3,4,5,6]"]
    words = shlex.split(curl)
    assert words[:4] == ["curl", "-s", "http://localhost:8000/v2/models/it/infer", "-d"]
    assert json.loads(words[4])["inputs"][0]["shape"] == [1, 3, 2]


def test_another_port_is_in_the_lines() -> None:
    client, _ = example_lines(spec(SPECS["optional"]), "http://localhost:9000", "naiad")
    assert client == "naiad infer it -u http://localhost:9000 'IN=[1]'"


def test_a_decoupled_model_is_asked_for_a_stream() -> None:
    _, curl = example_lines(
        spec(SPECS["optional"] + " model_transaction_policy { decoupled: true }"), "http://localhost:8000", "naiad"
    )
    words = shlex.split(curl)
    assert words[2].endswith("/generate_stream")
    assert json.loads(words[4]) == {"IN": 1}


def test_a_large_tensor_comes_from_a_file() -> None:
    text = 'input [ { name: "IMAGE" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } ]'
    assert example_lines(spec(text), "http://localhost:8000", "naiad") == ["naiad infer it IMAGE=@image.npy"]
