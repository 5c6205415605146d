from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import InvalidArgument, ServingError
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from protocols.http.inference.generate_codec import decode_generate, encode_generate, fit_shape
from shm.tensor import Tensor


def spec(**inputs: tuple[str, tuple[int, ...]]) -> ModelSpec:
    tensors = {name: TensorSpec(name, datatype, shape, shape) for name, (datatype, shape) in inputs.items()}
    return ModelSpec("m", "", "fake", 0, tensors, {})


SPEC = spec(TEXT=("BYTES", (-1,)), NUMBERS=("INT32", (-1, 2)), ONE=("FP32", (1,)))


def decode(body: Any, model: ModelSpec = SPEC) -> Request:
    request = Request("m", [], RecordingSink(), streaming=True)
    decode_generate(body if isinstance(body, bytes) else json.dumps(body).encode(), request, model, 1 << 20)
    return request


def refusal(body: Any, model: ModelSpec = SPEC) -> str:
    with pytest.raises(ServingError) as caught:
        decode(body, model)
    return caught.value.message


def test_members_are_inputs_or_parameters() -> None:
    request = decode(
        {"TEXT": "hi", "NUMBERS": [1, 2, 3, 4], "id": "7", "stream": False, "parameters": {"ONE": 2, "t": 0.5}}
    )
    assert [(t.name, t.datatype, t.shape, t.data) for t in request.inputs] == [
        ("TEXT", "BYTES", [1], b"\x02\x00\x00\x00hi"),
        ("NUMBERS", "INT32", [2, 2], struct.pack("<4i", 1, 2, 3, 4)),
        ("ONE", "FP32", [1], struct.pack("<f", 2)),
    ]
    assert request.id == "7"
    assert request.parameters == {"id": "7", "stream": False, "t": 0.5}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"TEXT":"a","id":"7","TEXT":"b"}', "[request id: 7] input 'TEXT' already exists in request"),
        (b'{"TEXT":"a","TEXT":"b"}\0', "[request id: <id_unknown>] input 'TEXT' already exists in request"),
        (
            b'{"TEXT":"a","ONE":1,"ONE":2,"TEXT":"b"}',  # the first that comes for the second time
            "[request id: <id_unknown>] input 'ONE' already exists in request",
        ),
        (
            b'{"TEXT":"a","ONE":1,"TEXT":"b","ONE":2}',
            "[request id: <id_unknown>] input 'TEXT' already exists in request",
        ),
        (b'{"TEXT":NaN,"TEXT":"b"}', "[request id: <id_unknown>] input 'TEXT' already exists in request"),
        (
            b'{"id":"7","parameters":{"ONE":1,"ONE":2}}',
            "Converting keyword: 'parameters': [request id: 7] input 'ONE' already exists in request",
        ),
    ],
)
def test_an_input_that_comes_twice_is_refused(body: bytes, message: str) -> None:
    assert refusal(body).startswith(message)


def test_the_name_of_an_input_may_be_a_value_too() -> None:
    assert decode(b'{"TEXT":["TEXT","TEXT"],"t":"ONE","ONE":1}').parameters == {"t": "ONE"}


def test_special_numbers_are_accepted() -> None:
    assert decode(b'{"ONE":Infinity}').inputs[0].data == struct.pack("<f", float("inf"))
    assert decode(b'{"ONE":[-Inf]}').inputs[0].data == struct.pack("<f", float("-inf"))


@pytest.mark.parametrize(
    ("dims", "count", "shape"),
    [((-1,), 3, [3]), ((-1, -1), 3, [1, 3]), ((-1, 4), 8, [2, 4]), ((2, 2), 4, [2, 2]), ((-1,), 0, [0]), ((), 1, [])],
)
def test_the_innermost_variable_dimension_takes_what_is_left(
    dims: tuple[int, ...], count: int, shape: list[int]
) -> None:
    assert fit_shape("X", dims, count) == shape


@pytest.mark.parametrize(
    ("dims", "count"),
    [((4,), 8), ((4,), 3), ((4,), 0), ((), 2), ((0,), 1), ((2, -1), 1), ((2, -1), 3), ((-1, 2), 3)],
)
def test_a_count_that_does_not_come_out_even_is_refused(dims: tuple[int, ...], count: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        fit_shape("X", dims, count)
    assert caught.value.message == "The schema can not convert input 'X' to tensor with proper shape"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"id": 5}, "Unable to parse 'id': attempt to access JSON non-string as string"),
        ({"x": []}, "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'."),
        (
            {"parameters": {"x": None}},
            "Converting keyword: 'parameters': parameter 'x' has invalid type. It should be either 'int', 'bool', "
            "or 'string'.",
        ),
        (
            {"parameters": 5},
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object",
        ),
        ({"TEXT": 5}, "Unable to parse JSON bytes array: attempt to access JSON non-string as string"),
        (
            {"ONE": [[1, 2]]},
            "Unable to parse 'data': Shape does not match true shape of 'data' field (input 'ONE' has 2 elements in "
            "'data', its shape has 1)",
        ),
        ({"ONE": None}, "Unable to parse 'data': attempt to access JSON non-number as double"),
        (b'{"ONE":1e400}', "failed to parse the request JSON buffer: Number too big to be stored in double. at 7"),
        (b'{"parameters":{"x":[1,}}', "failed to parse the request JSON buffer: Invalid value. at 22"),
        (
            {"ONE": 1, "parameters": {"ONE": 2}},
            "Converting keyword: 'parameters': [request id: <id_unknown>] input 'ONE' already exists in request",
        ),
        ({"ONE": [[]] * 2}, "The schema can not convert input 'ONE' to tensor with proper shape"),
    ],
)
def test_what_cannot_be_mapped_is_refused_with_tritons_text(body: Any, text: str) -> None:
    assert refusal(body) == text


def test_an_input_cannot_have_the_name_of_the_nested_object() -> None:
    assert refusal({"parameters": {}}, spec(parameters=("FP32", (1,)))) == (
        "Keyword 'parameters' for nested schema also given as input tensor name"
    )


def test_an_input_beyond_the_limit_is_refused() -> None:
    body = json.dumps({"NUMBERS": [1] * 300_000}).encode()
    assert "of size 1200000 bytes exceeds the maximum allowed input size of 1048576." in refusal(body)


@given(
    st.dictionaries(
        st.sampled_from(["TEXT", "NUMBERS", "ONE", "id", "parameters", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["TEXT", "ONE", "x"]), inner),
        ),
    )
)
def test_any_body_is_decoded_or_refused(body: dict[str, Any]) -> None:
    try:
        request = decode(body)
    except ServingError:
        return
    assert all(tensor.data is not None for tensor in request.inputs)


def test_a_response_is_sorted_and_single_elements_are_scalars() -> None:
    outputs = [
        Tensor("z", "BYTES", [1, 1], b"\x02\x00\x00\x00hi"),
        Tensor("a", "INT32", [2], struct.pack("<2i", 1, -1)),
        Tensor("inf", "FP32", [1], struct.pack("<f", float("inf"))),
        Tensor("n", "FP32", [0], b""),
    ]
    response = Response("m", "2", "7", outputs=outputs, parameters={"p": True})
    assert encode_generate(response) == (
        b'{"a":[1,-1],"id":"7","inf":Infinity,"model_name":"m","model_version":"2","n":[],"p":true,"z":"hi"}'
    )
