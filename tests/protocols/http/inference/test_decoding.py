from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import tritonclient.http as client
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.spec import ModelSpec, TensorSpec
from kernel.errors import InvalidArgument, ServingError
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from protocols.http.inference.decoding import OutputFormat, decode_infer, decode_raw
from protocols.status import HTTP_STATUS
from shm.tensor import ClientSpan

LIMIT = 1 << 20

TENSOR = {"name": "A", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}


def decode(header: Any, binary: bytes = b"", limit: int = LIMIT) -> tuple[Request, OutputFormat]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    request = Request("m", [], RecordingSink())
    return request, decode_infer(text, memoryview(binary), request, limit)


def refusal(header: Any, binary: bytes = b"", limit: int = LIMIT) -> tuple[int, str]:
    with pytest.raises(ServingError) as caught:
        decode(header, binary, limit)
    return HTTP_STATUS[caught.value.code], caught.value.message


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in TENSOR.items() if key != name}


def tensor(**changes: Any) -> dict[str, Any]:
    return {**TENSOR, **changes}


def elsewhere(**parameters: Any) -> dict[str, Any]:
    """Return the tensor with its data where `parameters` say."""
    return {**without("data"), "parameters": parameters}


# ---- requests -------------------------------------------------------------------------------


def test_a_request_in_json_is_decoded() -> None:
    request, form = decode(
        {
            "id": "42",
            "parameters": {
                "sequence_id": 7,
                "sequence_start": True,
                "sequence_end": False,
                "priority": 2,
                "timeout": 1000,
                "binary_data_output": True,
                "tenant": "blue",
                "level": -3,
                "ratio": 0.5,
                "dry": True,
                "huge": 2**64 - 1,
            },
            "inputs": [TENSOR, {"name": "B", "datatype": "BYTES", "shape": [1, 2], "data": [["a", "ø"]]}],
            "outputs": [{"name": "X"}, {"name": "Y", "parameters": {"binary_data": True, "classification": 3}}],
        }
    )
    assert request.id == "42"
    assert (request.correlation_id, request.sequence_start, request.sequence_end) == (7, True, False)
    assert (request.priority, request.timeout_us) == (2, 1000)
    assert request.parameters == {"tenant": "blue", "level": -3, "ratio": 0.5, "dry": True, "huge": float(2**64)}
    assert [(t.name, t.datatype, t.shape, t.data) for t in request.inputs] == [
        ("A", "FP32", [2], struct.pack("<2f", 1, 2)),
        ("B", "BYTES", [1, 2], b"\x01\x00\x00\x00a\x02\x00\x00\x00\xc3\xb8"),
    ]
    assert [(o.name, o.classification) for o in request.outputs] == [("X", 0), ("Y", 3)]
    assert (form.is_binary("X"), form.is_binary("Y"), form.is_binary("other")) == (False, True, True)


def test_a_sequence_can_have_a_text_for_its_id() -> None:
    request, _ = decode({"parameters": {"sequence_id": "seven"}, "inputs": []})
    assert request.correlation_id == "seven"


def test_binary_data_is_taken_in_the_order_of_the_inputs() -> None:
    request, _ = decode(
        {
            "inputs": [
                {"name": "A", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}},
                TENSOR,
                {"name": "N", "datatype": "UINT8", "shape": [0], "parameters": {"binary_data_size": 0}},
                {"name": "C", "datatype": "FP16", "shape": [1], "parameters": {"binary_data_size": 2}},
            ]
        },
        b"abcd",
    )
    assert [bytes(t.data or b"") for t in request.inputs] == [b"ab", struct.pack("<2f", 1, 2), b"", b"cd"]


def test_tensors_in_shared_memory_are_references() -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_offset": 4}
    request, _ = decode(
        {
            "inputs": [{"name": "A", "datatype": "FP32", "shape": [2], "parameters": place}],
            "outputs": [{"name": "X", "parameters": {"shared_memory_region": "r", "binary_data": False}}],
        }
    )
    assert request.inputs[0].client_span == ClientSpan("r", 8, 4)
    assert request.inputs[0].data is None
    assert request.outputs[0].client_span == ClientSpan("r", 0, 0)


def test_data_of_an_input_without_elements_is_not_read() -> None:
    request, _ = decode({"inputs": [tensor(shape=[0], data=5)]})
    assert request.inputs[0].data == b""


def test_special_numbers_are_accepted_anywhere_in_the_header() -> None:
    request, _ = decode(
        b'{"parameters":{"x":Infinity},"inputs":[{"name":"A","datatype":"FP32","shape":[2],"data":[1,-Inf]}]}\x00'
    )
    assert request.parameters == {"x": float("inf")}
    assert request.inputs[0].data == struct.pack("<2f", 1, float("-inf"))


def test_an_unknown_datatype_of_binary_data_is_left_to_the_model() -> None:
    request, _ = decode(
        {"inputs": [{"name": "A", "datatype": "WHAT", "shape": [1], "parameters": {"binary_data_size": 1}}]}, b"x"
    )
    assert request.inputs[0].datatype == "<invalid>"


@pytest.mark.parametrize("parameters", [5, None, [], {}, "x"])
def test_tensor_parameters_that_are_no_object_are_ignored(parameters: Any) -> None:
    request, _ = decode({"inputs": [tensor(parameters=parameters)], "outputs": [{"name": "X", "parameters": 5}]})
    assert request.inputs[0].byte_size == 8


ONE_FIELD = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)

NO_MEMBER = "attempt to access non-existing object member"

NOT_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"

NOT_STRING = "attempt to access JSON non-string as string"

NOT_BOOL = "attempt to access JSON non-boolean as boolean"

BAD_PARAMETER = "parameter 'p' has invalid type. It should be either 'int', 'bool', or 'string'."


@pytest.mark.parametrize(
    ("header", "status", "text"),
    [
        (b"{nonsense", 500, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        ({}, 500, f"Unable to parse 'inputs': {NO_MEMBER} 'inputs'"),
        ([], 500, f"Unable to parse 'inputs': {NO_MEMBER} 'inputs'"),
        (5, 500, f"Unable to parse 'inputs': {NO_MEMBER} 'inputs'"),
        ({"inputs": 5}, 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": None}, 500, "Unable to parse 'inputs': attempt to access JSON non-array as array"),
        ({"inputs": [5]}, 400, ONE_FIELD + "no field is set"),
        ({"id": 5, "inputs": 5}, 500, f"Unable to parse 'id': {NOT_STRING}"),
        ({"parameters": []}, 500, "failed to get request params.: attempt to get members for non-object"),
        ({"parameters": {"sequence_id": -1}}, 500, f"Unable to parse 'sequence_id': {NOT_STRING}"),
        ({"parameters": {"sequence_start": 1}}, 500, f"Unable to parse 'sequence_start': {NOT_BOOL}"),
        ({"parameters": {"sequence_end": None}}, 500, f"Unable to parse 'sequence_end': {NOT_BOOL}"),
        ({"parameters": {"priority": -1}}, 500, f"Unable to parse 'priority': {NOT_UNSIGNED}"),
        ({"parameters": {"timeout": "1"}}, 500, f"Unable to parse 'timeout': {NOT_UNSIGNED}"),
        ({"parameters": {"binary_data_output": 1}}, 500, f"Unable to parse 'binary_data_output': {NOT_BOOL}"),
        ({"parameters": {"p": []}}, 400, BAD_PARAMETER),
        ({"parameters": {"p": None}}, 400, BAD_PARAMETER),
        (
            {"parameters": {"triton_x": 1}},
            400,
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
        ),
    ],
)
def test_a_header_that_is_wrong_is_refused_with_tritons_text(header: Any, status: int, text: str) -> None:
    assert refusal(header) == (status, text)


@pytest.mark.parametrize(
    ("given", "status", "text"),
    [
        (without("name"), 500, f"Unable to parse 'name': {NO_MEMBER} 'name'"),
        (without("datatype"), 500, f"Unable to parse 'datatype': {NO_MEMBER} 'datatype'"),
        (without("shape"), 500, f"Unable to parse 'shape': {NO_MEMBER} 'shape'"),
        (without("data"), 400, ONE_FIELD + "no field is set"),
        (tensor(parameters={"binary_data_size": 8}), 400, ONE_FIELD + "set 'data' 'binary_data_size'"),
        (
            elsewhere(shared_memory_region="r", binary_data_size=8),
            400,
            ONE_FIELD + "set 'binary_data_size' 'shared_memory_region'",
        ),
        (tensor(name=5), 500, f"Unable to parse 'name': {NOT_STRING}"),
        (tensor(datatype=None), 500, f"Unable to parse 'datatype': {NOT_STRING}"),
        (tensor(shape=2), 500, "Unable to parse 'shape': attempt to access JSON non-array as array"),
        (tensor(shape=[-2]), 500, f"Unable to parse 'shape': {NOT_UNSIGNED}"),
        (tensor(shape=[2.0]), 500, f"Unable to parse 'shape': {NOT_UNSIGNED}"),
        (tensor(shape=[True]), 500, f"Unable to parse 'shape': {NOT_UNSIGNED}"),
        (
            tensor(shape=[2**64 - 1, 3]),
            400,
            "invalid shape for input 'A': shape [-1,3] contains one or more invalid dimensions",
        ),
        (
            tensor(shape=[2**62, 4]),
            400,
            "invalid shape for input 'A': shape [4611686018427387904,4] causes total element count to exceed "
            "maximum size of 9223372036854775807",
        ),
        (
            tensor(shape=[2**62]),
            400,
            "byte size overflow for input 'A': element count (4611686018427387904) * data type size (4) exceeds "
            "maximum allowed size (9223372036854775807)",
        ),
        (tensor(datatype="FLOAT"), 400, "invalid datatype for input A"),
        (tensor(data=["x", "y"]), 500, "Unable to parse 'data': attempt to access JSON non-number as double"),
        (
            tensor(shape=[300_000]),
            400,
            "JSON input 'A' has a byte_size (1200000 bytes) that exceeds the maximum allowed value of 1048576 "
            "bytes. Use --http-max-input-size to increase the limit.",
        ),
        (elsewhere(binary_data_size=-1), 500, f"Unable to parse 'binary_data_size': {NOT_UNSIGNED}"),
        (
            elsewhere(binary_data_size=9),
            400,
            "unexpected size for input 'A', expecting 1 additional bytes for model 'm'",
        ),
        (elsewhere(binary_data_size=7), 400, "unexpected additional input data for model 'm'"),
        (elsewhere(shared_memory_region=5), 500, f"Unable to parse 'shared_memory_region': {NOT_STRING}"),
        (
            elsewhere(shared_memory_region="r", shared_memory_offset="x"),
            500,
            f"Unable to parse 'shared_memory_offset': {NOT_UNSIGNED}",
        ),
        (
            elsewhere(shared_memory_region="r", shared_memory_byte_size=-1),
            500,
            f"Unable to parse 'shared_memory_byte_size': {NOT_UNSIGNED}",
        ),
    ],
)
def test_an_input_that_is_wrong_is_refused_with_tritons_text(given: Any, status: int, text: str) -> None:
    assert refusal({"inputs": [given]}, b"8 bytes.") == (status, text)


@pytest.mark.parametrize(
    ("outputs", "status", "text"),
    [
        (5, 500, "Unable to parse 'outputs': attempt to access JSON non-array as array"),
        ([5], 500, f"Unable to parse 'name': {NO_MEMBER} 'name'"),
        ([{"name": 5}], 500, f"Unable to parse 'name': {NOT_STRING}"),
        ([{"name": "X", "parameters": {"classification": -1}}], 500, f"Unable to set 'classification': {NOT_UNSIGNED}"),
        ([{"name": "X", "parameters": {"binary_data": 1}}], 500, f"Unable to parse 'binary_data': {NOT_BOOL}"),
        (
            [{"name": "X", "parameters": {"shared_memory_region": "r", "classification": 1}}],
            400,
            "Output can't set both 'shared_memory_region' and 'classification'",
        ),
        (
            [{"name": "X", "parameters": {"shared_memory_region": "r", "binary_data": True}}],
            400,
            "Output can't set both 'shared_memory_region' and 'binary_data'",
        ),
    ],
)
def test_an_output_that_is_wrong_is_refused_with_tritons_text(outputs: Any, status: int, text: str) -> None:
    assert refusal({"inputs": [TENSOR], "outputs": outputs}) == (status, text)


def test_a_number_too_big_in_a_tensor_is_found_where_it_stands_in_the_header() -> None:
    text = b'{"inputs":[{"name":"IN_FP32","datatype":"FP32","shape":[2],"data":[1e400,1]}]}'
    assert refusal(text) == (
        500,
        "failed to parse the request JSON buffer: Number too big to be stored in double. at 67",
    )


def test_a_shape_of_very_many_dimensions_costs_no_time() -> None:
    status, text = refusal({"inputs": [tensor(shape=[2**62] * 50_000)]})
    assert status == 400
    assert len(text) < 5000


HEADERS = st.dictionaries(
    st.sampled_from(["id", "parameters", "inputs", "outputs"]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-1, 2**65) | st.floats() | st.sampled_from(["A", "FP32", "BYTES", "r"]),
        lambda children: (
            st.lists(children, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["name", "datatype", "shape", "data", "parameters", "binary_data_size", "shared_memory_region"]
                ),
                children,
            )
        ),
    ),
)


@given(HEADERS, st.binary(max_size=8))
def test_any_header_is_decoded_or_refused(header: dict[str, Any], binary: bytes) -> None:
    try:
        request, _ = decode(header, binary)
    except ServingError:
        return
    assert all((t.data is None) != (t.client_span is None) for t in request.inputs)


@given(st.binary())
def test_any_bytes_are_decoded_or_refused(text: bytes) -> None:
    with pytest.raises(ServingError):
        decode(b'{"inputs":[{"name":"A",' + text)


# ---- what the real client sends -------------------------------------------------------------


def client_body(inputs: list[Any], **more: Any) -> tuple[Request, OutputFormat]:
    body, length = client.InferenceServerClient.generate_request_body(inputs, **more)
    length = len(body) if length is None else length
    return decode(bytes(body[:length]), bytes(body[length:]))


def test_the_python_clients_binary_request_is_decoded() -> None:
    images = client.InferInput("IMAGES", [2, 3], "FP16")
    images.set_data_from_numpy(np.arange(6, dtype=np.float16).reshape(2, 3))
    words = client.InferInput("WORDS", [2], "BYTES")
    words.set_data_from_numpy(np.array([b"a", b"bc"], dtype=np.object_))
    request, form = client_body(
        [images, words],
        outputs=[client.InferRequestedOutput("X"), client.InferRequestedOutput("Y", binary_data=False)],
        request_id="7",
        sequence_id=5,
        sequence_start=True,
        priority=1,
        timeout=9,
        parameters={"tenant": "blue"},
    )
    assert [(t.name, t.datatype, t.shape) for t in request.inputs] == [
        ("IMAGES", "FP16", [2, 3]),
        ("WORDS", "BYTES", [2]),
    ]
    assert bytes(request.inputs[0].data or b"") == np.arange(6, dtype=np.float16).tobytes()
    assert bytes(request.inputs[1].data or b"") == b"\x01\x00\x00\x00a\x02\x00\x00\x00bc"
    assert (request.id, request.correlation_id, request.sequence_start) == ("7", 5, True)
    assert (request.priority, request.timeout_us, request.parameters) == (1, 9, {"tenant": "blue"})
    assert (form.is_binary("X"), form.is_binary("Y")) == (True, False)


def test_the_python_clients_json_request_is_decoded() -> None:
    numbers = client.InferInput("N", [2, 2], "INT64")
    numbers.set_data_from_numpy(np.array([[1, -2], [3, 4]], dtype=np.int64), binary_data=False)
    request, form = client_body([numbers])
    assert request.inputs[0].data == struct.pack("<4q", 1, -2, 3, 4)
    assert form.is_binary("anything")


def test_the_python_clients_shared_memory_request_is_decoded() -> None:
    given = client.InferInput("A", [2], "FP32")
    given.set_shared_memory("region", 8, offset=16)
    request, _ = client_body([given])
    assert request.inputs[0].client_span == ClientSpan("region", 8, 16)


PREFIX = "[request id: <id_unknown>] "


def spec(*inputs: tuple[str, tuple[int, ...]], max_batch_size: int = 0) -> ModelSpec:
    tensors = {f"IN{n}": TensorSpec(f"IN{n}", datatype, dims, dims) for n, (datatype, dims) in enumerate(inputs)}
    return ModelSpec("m", "", "fake", max_batch_size, tensors, {})


def test_the_variable_dimension_follows_from_the_size() -> None:
    tensor = decode_raw(struct.pack("<6f", *range(6)), spec(("FP32", (-1, 2)), max_batch_size=8))
    assert (tensor.name, tensor.datatype, tensor.shape) == ("IN0", "FP32", [1, 3, 2])
    assert tensor.byte_size == 24


def test_an_empty_body_is_an_empty_tensor() -> None:
    assert decode_raw(b"", spec(("INT32", (-1,)))).shape == [0]


def test_a_text_becomes_the_only_element() -> None:
    tensor = decode_raw(b"ok", spec(("BYTES", (1,)), max_batch_size=4))
    assert (tensor.shape, tensor.data) == ([1, 1], b"\x02\x00\x00\x00ok")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            spec(("FP32", (1,)), ("FP32", (1,))),
            "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'm' model configuration",
        ),
        (
            spec(("FP32", (-1, -1))),
            "The shape of the raw input 'IN0' can not be deduced because there are more than one variable-sized "
            "dimension",
        ),
        (spec(("BYTES", (-1,))), "For BYTE datatype raw input 'IN0', the model must have input shape [1]"),
        (spec(("BYTES", (2,))), "For BYTE datatype raw input 'IN0', the model must have input shape [1]"),
        (spec(("INT32", (-1,))), "input byte size mismatch for input 'raw_input' for model 'm'. Expected 8, got 11"),
        (spec(("INT32", (4,))), "input byte size mismatch for input 'raw_input' for model 'm'. Expected 16, got 11"),
    ],
)
def test_what_cannot_be_deduced_is_refused_with_tritons_text(model: ModelSpec, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode_raw(b"eleven byte", model)
    assert caught.value.message == PREFIX + text
