import contextlib
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kernel.errors import ServingError
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from protocols.grpc.codec import decode_request, encode_response, start_request
from protocols.grpc.generated import grpc_service_pb2 as pb
from shm.datatypes import DATATYPES
from shm.tensor import Tensor

Parameters = dict[str, pb.InferParameter]


def parameters_strategy() -> st.SearchStrategy[Parameters]:
    keys = st.sampled_from(
        [
            "sequence_id",
            "sequence_start",
            "priority",
            "timeout",
            "triton_enable_empty_final_response",
            "triton_x",
            "shared_memory_region",
            "shared_memory_offset",
            "shared_memory_byte_size",
            "classification",
            "mine",
            "",
        ]
    )
    values: list[st.SearchStrategy[dict[str, Any]]] = [
        st.just({}),
        st.fixed_dictionaries({"bool_param": st.booleans()}),
        st.fixed_dictionaries({"int64_param": st.integers(-(2**63), 2**63 - 1)}),
        st.fixed_dictionaries({"uint64_param": st.integers(0, 2**64 - 1)}),
        st.fixed_dictionaries({"double_param": st.floats()}),
        st.fixed_dictionaries({"string_param": st.text("ab é", max_size=5)}),
    ]
    return st.dictionaries(keys, st.one_of(*values).map(lambda value: pb.InferParameter(**value)), max_size=3)


def contents_strategy() -> st.SearchStrategy[pb.InferTensorContents | None]:
    lists: dict[str, st.SearchStrategy[Any]] = {
        "bool_contents": st.booleans(),
        "int_contents": st.integers(-(2**31), 2**31 - 1),
        "int64_contents": st.integers(-(2**63), 2**63 - 1),
        "uint_contents": st.integers(0, 2**32 - 1),
        "uint64_contents": st.integers(0, 2**64 - 1),
        "fp32_contents": st.floats(width=32),
        "fp64_contents": st.floats(),
        "bytes_contents": st.binary(max_size=4),
    }
    fields = st.fixed_dictionaries(
        {}, optional={name: st.lists(element, max_size=3) for name, element in lists.items()}
    )
    return st.none() | fields.map(lambda given: pb.InferTensorContents(**dict[str, Any](given)))


def tensors_strategy() -> st.SearchStrategy[list[pb.ModelInferRequest.InferInputTensor]]:
    one = st.builds(
        pb.ModelInferRequest.InferInputTensor,
        name=st.sampled_from(["A", "B", ""]),
        parameters=parameters_strategy(),
        datatype=st.sampled_from([*DATATYPES, "FP99", ""]),
        shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3),
        contents=contents_strategy(),
    )
    return st.lists(one, max_size=3)


def outputs_strategy() -> st.SearchStrategy[list[pb.ModelInferRequest.InferRequestedOutputTensor]]:
    one = st.builds(
        pb.ModelInferRequest.InferRequestedOutputTensor,
        name=st.sampled_from(["A", ""]),
        parameters=parameters_strategy(),
    )
    return st.lists(one, max_size=3)


@given(
    message=st.builds(
        pb.ModelInferRequest,
        parameters=parameters_strategy(),
        inputs=tensors_strategy(),
        outputs=outputs_strategy(),
        raw_input_contents=st.lists(st.binary(max_size=9), max_size=3),
    )
)
def test_any_message_is_decoded_or_refused(message: pb.ModelInferRequest) -> None:
    request = start_request(message, RecordingSink(), streaming=False)
    # Anything but a refusal is a bug, and fails the test.
    with contextlib.suppress(ServingError):
        decode_request(message, request)
        assert all((t.data is None) != (t.client_span is None) for t in request.inputs)


def raw_tensors_strategy() -> st.SearchStrategy[list[tuple[str, str, list[int], bytes]]]:
    one = st.tuples(
        st.text("ab é", max_size=5),
        st.sampled_from(list(DATATYPES)),
        st.lists(st.integers(0, 2**63 - 1), max_size=4),
        st.binary(max_size=64),
    )
    return st.lists(one, max_size=4)


@given(tensors=raw_tensors_strategy(), wrap=st.sampled_from([bytes, bytearray, memoryview]))
def test_tensors_pass_through_both_codecs_unchanged(
    tensors: list[tuple[str, str, list[int], bytes]], wrap: Callable[[bytes], bytes]
) -> None:
    outputs = [Tensor(name, datatype, shape, data=wrap(raw)) for name, datatype, shape, raw in tensors]
    response = pb.ModelInferResponse()
    encode_response(Response("m", "1", "7", outputs=outputs), response)
    message = pb.ModelInferRequest(raw_input_contents=response.raw_output_contents)
    for output in response.outputs:
        message.inputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
    request = start_request(message, RecordingSink(), streaming=False)
    decode_request(message, request)
    assert [(t.name, t.datatype, t.shape, t.data) for t in request.inputs] == tensors
