from __future__ import annotations

import base64
import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import InternalError
from kernel.serving.response import Response
from shm.tensor import Tensor
from tests.protocols.openai.door import Door, Script, run, text_tensor

if TYPE_CHECKING:
    from kernel.serving.request import Request

PATH = "/v1/embeddings"
OURS = """
input { name: "openai_request" data_type: TYPE_STRING dims: [1] }
output { name: "embedding" data_type: TYPE_FP32 dims: [-1] }
output { name: "num_input_tokens" data_type: TYPE_INT32 dims: [1] }
"""
VLLM = """
input { name: "text_input" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "embedding_request" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "return_num_input_tokens" data_type: TYPE_BOOL dims: [1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""
ASKED = {"model": "vectors", "input": "hello"}


def model(text: str = OURS, declared: str = "") -> ModelConfig:
    more = f'parameters {{ key: "naiad.openai_fields" value {{ string_value: "{declared}" }} }}' if declared else ""
    return text_format.Parse(f'name: "vectors" backend: "fake" {text} {more}', ModelConfig())


def count_letters(self: Script, request: Request) -> None:
    """Respond with a vector of the length of the text, and how many tokens it has."""
    asked = self.asked[-1]["input"]
    values = [float(len(asked)), 0.5]
    outputs = [
        Tensor("embedding", "FP32", [2], struct.pack("<2f", *values)),
        Tensor("num_input_tokens", "INT32", [1], (3).to_bytes(4, "little")),
    ]
    request.respond(Response("vectors", "1", request.id, outputs=outputs))


def test_each_input_has_a_vector_in_order() -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(PATH, {**ASKED, "input": ["a", "bcd"], "encoding_format": "float"})
        assert status == 200
        assert body == {
            "object": "list",
            "data": [
                {"object": "embedding", "index": 0, "embedding": [1.0, 0.5]},
                {"object": "embedding", "index": 1, "embedding": [3.0, 0.5]},
            ],
            "model": "vectors",
            "usage": {"prompt_tokens": 6, "total_tokens": 6},
        }
        assert script.asked == [{"model": "vectors", "input": "a"}, {"model": "vectors", "input": "bcd"}]
        _, body = await door.post(PATH, {**ASKED, "encoding_format": "base64"})
        assert struct.unpack("<2f", base64.b64decode(body["data"][0]["embedding"])) == (5.0, 0.5)
        assert [each["id"] for each in (await door.get("/v1/models"))[1]["data"]] == ["vectors"]
        assert (await door.post("/v1/completions", {"model": "vectors", "prompt": "a"}))[0] == 400

    script = Script(count_letters)
    run(test, (model(), script))


def test_token_ids_and_dimensions_are_for_models_that_declare_them() -> None:
    async def test(door: Door) -> None:
        assert (await door.post(PATH, {**ASKED, "input": [[1, 2], [3]], "dimensions": 2}))[0] == 200
        assert [(each["input"], each["dimensions"]) for each in script.asked] == [([1, 2], 2), ([3], 2)]

    script = Script(count_letters)
    run(test, (model(declared="prompt_token_ids,dimensions"), script))


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": [1, 2]}, 400, "input"),
        ({"dimensions": 2}, 400, "dimensions"),
        ({"input": ["a"] * 1025}, 400, "input"),
        ({"input": ""}, 422, "input"),
        ({"input": []}, 422, "input"),
        ({"input": None}, 422, "input"),
        ({"input": [""]}, 422, "input"),
        ({"input": ["a", 1]}, 422, "input.1"),
        ({"input": {"a": 1}}, 422, "input"),
        ({"encoding_format": "hex"}, 422, "encoding_format"),
        ({"dimensions": 0}, 422, "dimensions"),
        ({"temperature": 1}, 422, "temperature"),
        ({"model": "none"}, 400, "model"),
        ({"model": 123}, 422, "model"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_said_with_the_field(fields: Any, status: int, param: str) -> None:
    async def test(door: Door) -> None:
        found, body = await door.post(PATH, {**ASKED, **fields})
        assert (found, body["error"]["param"]) == (status, param)

    run(test, (model(), Script(count_letters)))


def test_a_large_request_is_decoded_by_helpers() -> None:
    async def test(door: Door) -> None:
        status, body = await door.post(PATH, {**ASKED, "input": ["x" * 50_000, "y"]})
        assert status == 200
        assert [each["embedding"][0] for each in body["data"]] == [50_000.0, 1.0]
        assert door.lab.helpers.started == ["openai.find_model", "openai.prepare"]

    run(test, (model(), Script(count_letters)))


def test_a_failure_and_a_response_without_a_vector_are_errors() -> None:
    def respond(self: Script, request: Request) -> None:
        if self.asked[-1]["input"] == "fail":
            request.fail(InternalError("broken"))
        elif self.asked[-1]["input"] == "none":
            request.respond(Response("vectors", "1", request.id))
        else:
            request.respond(Response("vectors", "1", request.id, outputs=[text_tensor("embedding", "a")]))

    async def test(door: Door) -> None:
        for text, detail in (
            ("fail", "broken"),
            ("none", "the model has sent no vector for input 0"),
            ("text", "the model has sent no output 'embedding' of FP32"),
        ):
            status, body = await door.post(PATH, {**ASKED, "input": text})
            assert (status, body["detail"]) == (500, detail)

    run(test, (model(), Script(respond)))


@pytest.mark.parametrize("optional", [True, False])
def test_a_model_of_vllms_backend_makes_vectors(optional: bool) -> None:
    """The backend itself declares `text_input` as required."""
    declared = VLLM if optional else VLLM.replace(" optional: true", "", 1)
    expected = {"embedding_request", "return_num_input_tokens", *(() if optional else ("text_input",))}

    def respond(self: Script, request: Request) -> None:
        self.inputs = {tensor.name: bytes(tensor.raw()) for tensor in request.inputs}
        outputs = [
            text_tensor("text_output", "[1.5, -2]"),
            Tensor("num_input_tokens", "UINT32", [], (4).to_bytes(4, "little")),
        ]
        request.respond(Response("vectors", "1", request.id, outputs=outputs))

    async def test(door: Door) -> None:
        _, body = await door.post(PATH, {**ASKED, "input": [1, 2], "dimensions": 2})
        assert body["data"][0]["embedding"] == [1.5, -2.0]
        assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
        assert json.loads(script.inputs["embedding_request"][4:]) == {
            "input": [1, 2], "pooling_params": {"dimensions": [2]}
        }  # fmt: skip
        assert script.inputs.keys() == expected

    script = Script(respond, reads=False)
    run(test, (model(declared), script))
