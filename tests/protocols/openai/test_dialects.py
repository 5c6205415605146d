from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import ModelSpec, model_spec
from kernel.errors import InternalError
from kernel.serving.request import NO_SINK, Request
from kernel.serving.response import Response
from kernel.serving.validation import validate
from protocols.openai.dialects import InputEach, VllmDialect, WholeRequest, dialect_of, required_dialect
from protocols.openai.errors import ApiError
from protocols.openai.pieces import read_piece
from protocols.openai.plans import Api, make_plan, read_document
from shm.datatypes import decode_strings
from shm.tensor import Tensor
from tests.protocols.openai.door import VLLM
from tests.protocols.openai.request_bodies import chat, completion

#: Those of TensorRT-LLM's models.
TENSORRT_LLM = """
max_batch_size: 8
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "max_tokens" data_type: TYPE_INT32 dims: [1] }
input { name: "stop_words" data_type: TYPE_STRING dims: [-1] optional: true }
input { name: "temperature" data_type: TYPE_FP32 dims: [1] optional: true }
input { name: "seed" data_type: TYPE_UINT64 dims: [1] optional: true }
input { name: "top_k" data_type: TYPE_INT32 dims: [1] optional: true }
input { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "bad_words" data_type: TYPE_STRING dims: [-1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""

#: Those of its newer API.
LLM_API = """
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "sampling_param_max_tokens" data_type: TYPE_INT32 dims: [1] optional: true }
input { name: "sampling_param_top_p" data_type: TYPE_FP32 dims: [1] optional: true }
input { name: "sampling_param_exclude_input_from_output" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "streaming" data_type: TYPE_BOOL dims: [1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [-1] }
"""


def spec_of(text: str) -> ModelSpec:
    return model_spec(text_format.Parse(f'name: "m" backend: "b" {text}', ModelConfig()))


def given(spec: ModelSpec, **fields: Any) -> list[dict[str, Any]]:
    """Return the inputs of each request that a completion becomes, as Python values. They fit the model."""
    document = read_document(json.dumps(completion(**fields)).encode(), Api.COMPLETIONS)
    _, requests = make_plan(document, required_dialect(spec), None)
    found = []
    for inputs in requests:
        validate(Request("m", list(inputs), NO_SINK, streaming=True), spec)
        found.append({tensor.name: value_of(tensor) for tensor in inputs})
    return found


def value_of(tensor: Tensor) -> Any:
    data = bytes(tensor.raw())
    if tensor.datatype == "BYTES":
        texts = [each.decode() for each in decode_strings(data)]
        return texts if tensor.name == "stop_words" else texts[0]
    letter = {"BOOL": "?", "INT32": "i", "FP32": "f", "UINT64": "Q"}[tensor.datatype]
    return struct.unpack(f"<{letter}", data)[0]


def test_the_dialect_follows_from_what_a_model_declares() -> None:
    assert isinstance(dialect_of(spec_of(VLLM)), VllmDialect)
    assert isinstance(dialect_of(spec_of(TENSORRT_LLM)), InputEach)
    assert isinstance(dialect_of(spec_of(LLM_API)), InputEach)
    ours = 'input { name: "openai_request" data_type: TYPE_STRING dims: [1] }'
    text = 'output { name: "text_output" data_type: TYPE_STRING dims: [1] }'
    assert isinstance(dialect_of(spec_of(ours + text)), WholeRequest)
    assert dialect_of(spec_of(ours)) is None
    assert dialect_of(spec_of(text)) is None
    assert dialect_of(spec_of(ours + text + 'input { name: "more" data_type: TYPE_FP32 dims: [1] }')) is None
    assert dialect_of(spec_of(TENSORRT_LLM + 'input { name: "more" data_type: TYPE_FP32 dims: [1] }')) is None


def test_vllm_gets_its_parameters_as_one_object() -> None:
    [inputs] = given(
        spec_of(VLLM), temperature=0.5, top_k=4, stop=["x"], logit_bias={"5": 1}, structured_outputs={"json": {}}
    )
    assert json.loads(inputs.pop("sampling_parameters")) == {
        "temperature": 0.5, "top_k": 4, "stop": ["x"], "logit_bias": {"5": 1}, "max_tokens": 16,
        "structured_outputs": '{"json":{}}',
    }  # fmt: skip
    assert inputs == {
        "text_input": "once", "stream": False, "exclude_input_in_output": True, "return_finish_reason": True,
        "return_num_input_tokens": True, "return_num_output_tokens": True,
    }  # fmt: skip


def test_vllm_streams_and_has_several_choices() -> None:
    requests = given(spec_of(VLLM), prompt=["a", "b"], n=2, seed=7, stream=True)
    assert [(each["text_input"], json.loads(each["sampling_parameters"])["seed"]) for each in requests] == [
        ("a", 7), ("a", 8), ("b", 7), ("b", 8)
    ]  # fmt: skip
    assert all(each["stream"] for each in requests)


def test_tensorrt_llm_gets_what_the_client_has_given_and_nothing_else() -> None:
    spec = spec_of(TENSORRT_LLM)
    [inputs] = given(spec)
    assert inputs == {"text_input": "once", "max_tokens": 16, "stream": False, "exclude_input_in_output": True}
    [inputs] = given(spec, temperature=1, seed=-1, top_k=3, stop=["a", "b"], max_tokens=5)
    assert inputs == {
        "text_input": "once", "max_tokens": 5, "temperature": 1.0, "seed": 2**64 - 1, "top_k": 3,
        "stop_words": ["a", "b"], "stream": False, "exclude_input_in_output": True,
    }  # fmt: skip


def test_the_newer_api_has_a_prefix() -> None:
    [inputs] = given(spec_of(LLM_API), top_p=0.5, stream=True)
    assert inputs == {
        "text_input": "once", "sampling_param_max_tokens": 16, "sampling_param_top_p": 0.5, "streaming": True,
        "sampling_param_exclude_input_from_output": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "fields", "text"),
    [
        (TENSORRT_LLM, {"top_p": 0.5}, "'top_p' is not supported: model 'm' has no input for it"),
        (TENSORRT_LLM, {"logit_bias": {"1": 1}}, "'logit_bias' is not supported: model 'm' has no input for it"),
        (LLM_API, {"temperature": 0.5}, "'temperature' is not supported: model 'm' has no input for it"),
        (VLLM, {"suffix": "x"}, "'suffix' is not supported: model 'm' is one of vLLM's backend, which does not take"),
        (VLLM, {"logprobs": 2}, "'logprobs' is not supported: model 'm' is one of vLLM's backend"),
        (TENSORRT_LLM, {"max_tokens": 2**40}, "1099511627776 is not in the range of the model's input 'max_tokens'"),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_name(config: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError, match=text) as caught:
        given(spec_of(config), **fields)
    assert caught.value.param == next(iter(fields))


def test_a_chat_needs_a_model_that_takes_messages() -> None:
    document = read_document(json.dumps(chat()).encode(), Api.CHAT)
    with pytest.raises(ApiError, match="model 'm' has no chat template: use /v1/completions"):
        make_plan(document, required_dialect(spec_of(VLLM)), None)


def test_responses_are_read_in_all_forms_of_backends() -> None:
    outputs = [
        Tensor("text_output", "BYTES", [1], b"\x02\0\0\0ab"),
        Tensor("finish_reason", "BYTES", [1], b"\x04\0\0\0None"),
        Tensor("num_input_tokens", "UINT32", [], (7).to_bytes(4, "little")),
        Tensor("num_output_tokens", "INT32", [1, 1], (3).to_bytes(4, "little")),
        Tensor("cumulative_logprob", "FP32", [1], bytes(4)),
    ]
    piece = read_piece(Response("m", "1", "", outputs=outputs), "text_output")
    assert (piece.text, piece.finish_reason, piece.prompt_tokens, piece.output_tokens) == (b"ab", "", 7, 3)
    with pytest.raises(InternalError, match="'num_input_tokens' is UINT32 of shape \\[2\\], expected one integer"):
        read_piece(Response("m", "1", "", outputs=[Tensor("num_input_tokens", "UINT32", [2], bytes(8))]), "text_output")
