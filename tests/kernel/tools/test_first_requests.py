"""First requests for the models of a server."""

from __future__ import annotations

import json
import shlex

import pytest

from kernel.config.spec import ModelSpec, SequenceBatching, TensorSpec
from kernel.serving.request import NO_SINK, Request
from kernel.serving.validation import validate
from kernel.testing import model_spec
from kernel.tools.first_requests import first_requests, request_lines
from kernel.tools.infer_arguments import RANDOM, build_inputs, split_arguments
from protocols.http.json.tensor import decode_data
from shm.tensor import Tensor

URL = "http://localhost:8000"


def tensor(name: str, datatype: str = "FP32", dims: tuple[int, ...] = (4,), *, batched: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, dims, (-1, *dims) if batched else dims)


def spec(*inputs: TensorSpec, name: str = "m", **more: object) -> ModelSpec:
    return ModelSpec(name, "", "python", 0, {each.name: each for each in inputs}, {}, **more)  # type: ignore[arg-type]


def commands(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.splitlines() if line.startswith("    ")]


def arguments(command: list[str]) -> list[str]:
    """Return the inputs of a command `... infer MODEL NAME=VALUE ...`."""
    return [each for each in command[command.index("infer") + 2 :] if "=" in each]


def test_a_small_model_gets_both_commands_as_they_are_typed() -> None:
    made = spec(tensor("A", batched=True), tensor("it's", "BYTES", (-1,)), name="my model")
    infer, curl = commands(first_requests([made], URL))
    assert infer[infer.index("infer") + 1] == "my model"
    metadata = {
        "name": "my model",
        "inputs": [
            {"name": "A", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "it's", "datatype": "BYTES", "shape": [-1]},
        ],
    }
    inputs = build_inputs(metadata, {}, split_arguments(arguments(infer)))
    assert [(each.shape, each.elements) for each in inputs] == [([1, 4], [1, 2, 3, 4]), ([1], ["text"])]
    assert curl[:3] == ["curl", "-s", f"{URL}/v2/models/my model/infer"]
    assert [each["shape"] for each in json.loads(curl[-1])["inputs"]] == [[1, 4], [1]]


def test_large_inputs_are_random_and_not_typed_as_json() -> None:
    (infer,) = commands(first_requests([spec(tensor("IMAGE", dims=(3, 224, 224)))], URL))
    assert arguments(infer) == [f"IMAGE={RANDOM}"]
    metadata = {"name": "m", "inputs": [{"name": "IMAGE", "datatype": "FP32", "shape": [-1, 3, 224, 224]}]}
    (made,) = build_inputs(metadata, {}, split_arguments(arguments(infer)))
    assert made.shape == [1, 3, 224, 224]
    assert len(made.raw) == 4 * 3 * 224 * 224
    assert all(0 <= element <= 1 for element in made.elements)


def test_a_row_of_a_table_is_random_for_naiad_and_typed_as_json() -> None:
    infer, curl = commands(first_requests([spec(tensor("input__0", dims=(30,)))], URL))
    assert arguments(infer) == [f"input__0={RANDOM}"]
    [given] = json.loads(curl[-1])["inputs"]
    assert (given["shape"], given["data"]) == ([30], list(range(1, 31)))


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP16", "BF16", "FP64", "BYTES"])
def test_every_datatype_can_be_random(datatype: str) -> None:
    metadata = {"name": "m", "inputs": [{"name": "A", "datatype": datatype, "shape": [-1, 5]}]}
    (made,) = build_inputs(metadata, {}, {"A": RANDOM})
    assert (made.shape, len(made.elements)) == ([1, 5], 5)


def test_a_port_of_its_own_is_named() -> None:
    infer, curl = commands(first_requests([spec(tensor("A"))], "http://localhost:9000"))
    assert infer[-2:] == ["--url", "http://localhost:9000"]
    assert curl[2].startswith("http://localhost:9000/")


def test_decoupled_models_are_asked_for_a_stream_and_sequences_have_no_line() -> None:
    texts = tensor("B", "BYTES", (2,))
    _, curl = commands(first_requests([spec(tensor("A", dims=(1,)), texts, decoupled=True)], URL))
    assert curl[2] == f"{URL}/v2/models/m/generate_stream"
    assert json.loads(curl[-1]) == {"A": 1, "B": ["text", "text"]}
    assert first_requests([spec(tensor("A"), sequence_batching=SequenceBatching())], URL) == ""


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT64", "FP64", "BYTES"])
def test_the_inputs_of_the_line_for_curl_are_those_of_the_model(datatype: str) -> None:
    expected = spec(tensor("IN", datatype, (-1, 2), batched=True))
    _, curl = request_lines(expected, URL, "naiad")
    [given] = json.loads(shlex.split(curl)[-1])["inputs"]
    data = decode_data("IN", datatype, json.dumps(given["data"]).encode(), len(given["data"]))
    validate(Request("m", [Tensor("IN", datatype, given["shape"], data)], NO_SINK), expected)


def test_what_json_cannot_carry_is_typed_for_naiad_only() -> None:
    assert request_lines(spec(tensor("A", "FP16", (2,))), URL, "naiad") == ["naiad infer m 'A=[1,2]'"]


def test_optional_inputs_are_left_out_and_so_are_too_many_models() -> None:
    optional = TensorSpec("B", "FP32", (1,), (1,), optional=True)
    infer, _ = commands(first_requests([spec(tensor("A"), optional)], URL))
    assert [each.partition("=")[0] for each in arguments(infer)] == ["A"]
    assert first_requests([model_spec(f"m{number}") for number in range(4)], URL) == ""


def test_models_of_openais_api_are_asked_there_if_it_is_open() -> None:
    request = TensorSpec("openai_request", "BYTES", (1,), (1,))
    chat = ModelSpec("talk", "", "python", 0, {"openai_request": request}, {"text_output": request}, decoupled=True)
    vectors = ModelSpec("vectors", "", "python", 0, {"openai_request": request}, {"embedding": request})
    found = first_requests([chat, vectors], "http://localhost:8000", "http://localhost:9000")
    assert """curl -N http://localhost:9000/v1/chat/completions -d '{"model": "talk", "stream": true, """ in found
    assert """curl http://localhost:9000/v1/embeddings -d '{"model": "vectors", "input": "Hello"}'""" in found
    assert "/v1/" not in first_requests([chat, vectors], "http://localhost:8000")
