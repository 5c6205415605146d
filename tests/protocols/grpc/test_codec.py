import struct
from typing import Any

import pytest

from kernel.errors import InternalError, InvalidArgument
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from protocols.grpc import codec
from protocols.grpc.codec import pack_contents
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.generated.grpc_service_pb2 import InferTensorContents as Contents
from shm.tensor import ClientSpan, RequestedOutput, Tensor

Parameters = dict[str, pb.InferParameter]


def parameter(**choice: Any) -> pb.InferParameter:
    return pb.InferParameter(**choice)


def tensor(name: str, parameters: Parameters | None = None, **more: Any) -> pb.ModelInferRequest.InferInputTensor:
    return pb.ModelInferRequest.InferInputTensor(
        **{"name": name, "datatype": "FP32", "shape": [2], "parameters": parameters, **more}
    )


def output(name: str, parameters: Parameters | None = None) -> pb.ModelInferRequest.InferRequestedOutputTensor:
    return pb.ModelInferRequest.InferRequestedOutputTensor(name=name, parameters=parameters)


def infer(**fields: Any) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", id="7", **fields)


def decode(message: pb.ModelInferRequest) -> tuple[Request, bool]:
    request = codec.start_request(message, RecordingSink(), streaming=False)
    return request, codec.decode_request(message, request)


def error_of(message: pb.ModelInferRequest) -> str:
    with pytest.raises(InvalidArgument) as caught:
        decode(message)
    return caught.value.message


REGION = parameter(string_param="r")

EIGHT = parameter(int64_param=8)

RESERVED = (
    "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
    "with 'triton_' are allowed: triton_enable_empty_final_response"
)


# ---- requests -------------------------------------------------------------------------------


def test_raw_contents_belong_to_the_inputs_without_other_data() -> None:
    request, _ = decode(
        infer(
            inputs=[
                tensor("A"),
                tensor("B", {"shared_memory_region": REGION, "shared_memory_byte_size": EIGHT}),
                tensor("C"),
            ],
            raw_input_contents=[b"aaaaaaaa", b"cccccccc", b"left over"],
        )
    )
    assert request.inputs == [
        Tensor("A", "FP32", [2], data=b"aaaaaaaa"),
        Tensor("B", "FP32", [2], client_span=ClientSpan("r", 8)),
        Tensor("C", "FP32", [2], data=b"cccccccc"),
    ]


def test_a_datatype_that_does_not_exist_is_called_invalid() -> None:
    request, _ = decode(infer(inputs=[tensor("A", datatype="FP99")], raw_input_contents=[b""]))
    assert request.inputs[0].datatype == "<invalid>"


def test_parameters_that_are_fields_of_the_request_do_not_reach_the_model() -> None:
    request, wants_empty_final = decode(
        infer(
            parameters={
                "sequence_id": parameter(int64_param=-1),
                "sequence_start": parameter(bool_param=True),
                "sequence_end": parameter(bool_param=True),
                "priority": parameter(uint64_param=3),
                "timeout": parameter(int64_param=500),
                "triton_enable_empty_final_response": parameter(bool_param=True),
                "b": parameter(bool_param=True),
                "d": parameter(double_param=1.5),
                "i": parameter(int64_param=-2),
                "s": parameter(string_param="text"),
            }
        )
    )
    assert request.correlation_id == 2**64 - 1
    assert (request.sequence_start, request.sequence_end) == (True, True)
    assert (request.priority, request.timeout_us) == (3, 500)
    assert wants_empty_final
    assert request.parameters == {"b": True, "d": 1.5, "i": -2, "s": "text"}
    assert (request.model_name, request.id, request.streaming) == ("m", "7", False)


def test_a_sequence_id_can_be_a_text() -> None:
    request, wants_empty_final = decode(infer(parameters={"sequence_id": parameter(string_param="abc")}))
    assert request.correlation_id == "abc"
    assert not wants_empty_final


def test_outputs_can_ask_for_classes_or_a_region() -> None:
    request, _ = decode(
        infer(
            outputs=[
                output("A", {"classification": parameter(int64_param=3)}),
                output(
                    "B",
                    {
                        "shared_memory_region": REGION,
                        "shared_memory_byte_size": EIGHT,
                        "shared_memory_offset": parameter(int64_param=16),
                    },
                ),
                output("C", {"binary_data": parameter(bool_param=True)}),
            ]
        )
    )
    assert request.outputs == [
        RequestedOutput("A", classification=3),
        RequestedOutput("B", client_span=ClientSpan("r", 8, 16)),
        RequestedOutput("C"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (
            "sequence_id",
            parameter(bool_param=True),
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        (
            "sequence_start",
            parameter(int64_param=1),
            "invalid value type for 'sequence_start' parameter, expected bool_param.",
        ),
        (
            "sequence_end",
            parameter(string_param="1"),
            "invalid value type for 'sequence_end' parameter, expected bool_param.",
        ),
        (
            "priority",
            parameter(string_param="1"),
            "invalid value type for 'priority' parameter, expected int64_param or uint64_param.",
        ),
        ("priority", parameter(int64_param=-1), "invalid value for 'priority', expected value >= 0."),
        (
            "timeout",
            parameter(uint64_param=1),
            "invalid value type for 'timeout' parameter, expected int64_param.",
        ),
        (
            "triton_enable_empty_final_response",
            parameter(string_param="x"),
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
        ),
        ("triton_final_response", parameter(bool_param=True), RESERVED),
        (
            "mine",
            parameter(uint64_param=1),
            "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param.",
        ),
        (
            "mine",
            parameter(),
            "invalid value type for 'mine' parameter, expected int64_param, bool_param, or string_param.",
        ),
    ],
)
def test_a_parameter_of_a_wrong_kind_is_refused(key: str, value: pb.InferParameter, text: str) -> None:
    # The parameters are looked at first: that an input has no data does not show.
    assert error_of(infer(parameters={key: value}, inputs=[tensor("A")])) == text


SHM_ERRORS: list[tuple[Parameters, str]] = [
    (
        {"shared_memory_region": EIGHT},
        "invalid value type for 'shared_memory_region' parameter for tensor 'A', expected string_param.",
    ),
    (
        {"shared_memory_offset": EIGHT},
        "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor 'A'",
    ),
    (
        {"shared_memory_byte_size": EIGHT},
        ("'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor 'A'"),
    ),
    (
        {"shared_memory_region": REGION, "shared_memory_offset": REGION},
        "invalid value type for 'shared_memory_offset' parameter for tensor 'A', expected int64_param.",
    ),
    (
        {"shared_memory_region": REGION, "shared_memory_byte_size": REGION},
        "invalid value type for 'shared_memory_byte_size' parameter for tensor 'A', expected int64_param.",
    ),
    (
        {"shared_memory_region": REGION},
        ("'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'A'"),
    ),
]


@pytest.mark.parametrize(("parameters", "text"), SHM_ERRORS)
def test_a_region_that_is_not_named_in_full_is_refused(parameters: Parameters, text: str) -> None:
    assert error_of(infer(inputs=[tensor("A", parameters)])) == text
    assert error_of(infer(outputs=[output("A", parameters)])) == text


CONTENTS = pb.InferTensorContents(fp32_contents=[1, 2])


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (infer(inputs=[tensor("A")]), "unable to find data for input tensor 'A' for model 'm' in request."),
        (
            infer(inputs=[tensor("A"), tensor("B")], raw_input_contents=[b"x"]),
            "unable to find data for input tensor 'B' for model 'm' in request.",
        ),
        (
            infer(inputs=[tensor("A", contents=CONTENTS)], raw_input_contents=[b"x"]),
            "contents field must not be specified when using raw_input_contents for 'A' for model 'm'",
        ),
        (
            infer(
                inputs=[
                    tensor(
                        "A",
                        {"shared_memory_region": REGION, "shared_memory_byte_size": EIGHT},
                        contents=CONTENTS,
                    )
                ]
            ),
            "unexpected 'content' provided when using shared memory for input tensor 'A' for model 'm'",
        ),
        (
            infer(outputs=[output("A", {"classification": REGION})]),
            "invalid value type for 'classification' parameter, expected int64_param",
        ),
        (
            infer(outputs=[output("A", {"classification": parameter(int64_param=0)})]),
            "invalid value for 'classification' parameter, expected >= 0",
        ),
        (
            infer(
                outputs=[
                    output(
                        "A",
                        {
                            "classification": EIGHT,
                            "shared_memory_region": REGION,
                            "shared_memory_byte_size": EIGHT,
                        },
                    )
                ]
            ),
            "output can't set both 'shared_memory_region' and 'classification'",
        ),
        # Inputs are looked at before outputs.
        (
            infer(inputs=[tensor("A")], outputs=[output("A", {"classification": REGION})]),
            "unable to find data for input tensor 'A' for model 'm' in request.",
        ),
    ],
)
def test_a_tensor_without_one_source_or_target_is_refused(message: pb.ModelInferRequest, text: str) -> None:
    assert error_of(message) == text


# ---- responses ------------------------------------------------------------------------------


def encoded(response: Response) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse()
    codec.encode_response(response, message)
    return message


def response(**more: Any) -> Response:
    return Response("m", "3", "7", **more)


def test_outputs_are_raw_contents_with_an_empty_one_for_a_region() -> None:
    message = encoded(
        response(
            outputs=[
                Tensor("A", "FP32", [1, 2], data=memoryview(b"12345678")),
                Tensor("B", "FP32", [2], client_span=ClientSpan("r", 8)),
                Tensor("C", "INT8", [0], data=b""),
            ]
        )
    )
    assert (message.model_name, message.model_version, message.id) == ("m", "3", "7")
    assert [(o.name, o.datatype, list(o.shape)) for o in message.outputs] == [
        ("A", "FP32", [1, 2]),
        ("B", "FP32", [2]),
        ("C", "INT8", [0]),
    ]
    assert list(message.raw_output_contents) == [b"12345678", b"", b""]
    assert not any(o.parameters or o.HasField("contents") for o in message.outputs)


def test_response_parameters_keep_their_types() -> None:
    message = encoded(response(outputs=[], parameters={"b": True, "i": -(2**63), "f": 0.5, "s": "é"}))
    assert message.parameters["b"] == parameter(bool_param=True)
    assert message.parameters["i"] == parameter(int64_param=-(2**63))
    assert message.parameters["f"] == parameter(double_param=0.5)
    assert message.parameters["s"] == parameter(string_param="é")


def test_a_parameter_that_no_field_can_hold_is_refused() -> None:
    with pytest.raises(InternalError, match="response parameter 'i' does not fit"):
        encoded(response(outputs=[], parameters={"i": 2**63}))


def test_a_response_larger_than_grpc_allows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_BODY_BYTE_SIZE", 7)
    with pytest.raises(InvalidArgument) as caught:
        encoded(response(outputs=[Tensor("A", "FP32", [2], data=b"12345678")]))
    assert caught.value.message == "Response has byte size 8 which exceeds gRPC's byte size limit 7."


def test_a_response_on_a_stream_says_whether_it_is_final() -> None:
    parts = codec.stream_response_parts(response(outputs=[], final=False))
    message = pb.ModelStreamInferResponse.FromString(b"".join(parts))
    assert message.infer_response.parameters["triton_final_response"] == parameter(bool_param=False)
    assert message.infer_response.model_version == "3"
    assert not message.error_message


def test_the_end_of_a_decoupled_request_has_the_version_that_was_asked_for() -> None:
    request, _ = decode(infer(model_version="2"))
    message = pb.ModelStreamInferResponse()
    codec.encode_stream_end(request, message)
    wanted = pb.ModelStreamInferResponse(
        infer_response=pb.ModelInferResponse(
            model_name="m",
            model_version="2",
            id="7",
            parameters={"triton_final_response": parameter(bool_param=True)},
        )
    )
    assert message == wanted


@pytest.mark.parametrize(
    ("final", "wanted"),
    [
        (None, pb.ModelInferResponse(id="7")),
        (
            True,
            pb.ModelInferResponse(
                id="7",
                model_name="m",
                parameters={"triton_final_response": parameter(bool_param=True)},
            ),
        ),
    ],
)
def test_an_error_on_a_stream_names_its_request(final: bool | None, wanted: pb.ModelInferResponse) -> None:
    request, _ = decode(infer())
    message = pb.ModelStreamInferResponse()
    codec.encode_stream_error(request, "caf\udce9", message, final=final)
    assert message == pb.ModelStreamInferResponse(error_message="caf?", infer_response=wanted)


@pytest.mark.parametrize(
    ("contents", "datatype", "raw"),
    [
        (Contents(bool_contents=[True, False]), "BOOL", b"\1\0"),
        (Contents(int_contents=[300, -1]), "INT8", struct.pack("<2b", 44, -1)),
        (Contents(int_contents=[70000, -2]), "INT16", struct.pack("<2h", 4464, -2)),
        (Contents(int_contents=[70000, -2]), "INT32", struct.pack("<2i", 70000, -2)),
        (Contents(int64_contents=[-3, 2**62]), "INT64", struct.pack("<2q", -3, 2**62)),
        (Contents(uint_contents=[300, 1]), "UINT8", struct.pack("<2B", 44, 1)),
        (Contents(uint_contents=[70000, 1]), "UINT16", struct.pack("<2H", 4464, 1)),
        (Contents(uint_contents=[2**32 - 1]), "UINT32", struct.pack("<I", 2**32 - 1)),
        (Contents(uint64_contents=[2**64 - 1]), "UINT64", struct.pack("<Q", 2**64 - 1)),
        (Contents(fp32_contents=[1.5, float("inf")]), "FP32", struct.pack("<2f", 1.5, float("inf"))),
        (Contents(fp64_contents=[0.1]), "FP64", struct.pack("<d", 0.1)),
        (Contents(bytes_contents=[b"ab", b""]), "BYTES", b"\2\0\0\0ab\0\0\0\0"),
        (Contents(), "FP32", b""),
        (Contents(), "<invalid>", b""),
    ],
)
def test_elements_become_the_raw_bytes_of_their_datatype(contents: Contents, datatype: str, raw: bytes) -> None:
    assert pack_contents(contents, datatype, "IN", "m") == raw


@pytest.mark.parametrize(
    ("contents", "datatype", "named"),
    [
        (Contents(int_contents=[1]), "FP32", "INT32"),
        (Contents(uint_contents=[1]), "INT8", "UINT32"),
        (Contents(fp64_contents=[1]), "FP32", "FP64"),
        (Contents(fp32_contents=[1]), "FP16", "FP32"),
        (Contents(bool_contents=[True]), "UINT8", "BOOL"),
        (Contents(bytes_contents=[b"a"]), "INT64", "BYTES"),
        (Contents(int_contents=[1], fp32_contents=[1]), "FP32", "INT32"),
        (Contents(fp32_contents=[1]), "<invalid>", "FP32"),
    ],
)
def test_a_field_that_does_not_fit_the_datatype_is_refused(contents: Contents, datatype: str, named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pack_contents(contents, datatype, "IN", "m")
    assert caught.value.message == (
        f"unexpected explicit tensor data for input tensor 'IN' for model 'm' of type '{named}', expected "
        f"datatype '{datatype}'"
    )


def test_a_second_field_is_refused() -> None:
    contents = Contents(int_contents=[1], fp32_contents=[1])
    with pytest.raises(InvalidArgument) as caught:
        pack_contents(contents, "INT32", "IN", "m")
    assert caught.value.message == (
        "unexpected explicit tensor data for input tensor 'IN' for model 'm', binary data was already supplied."
    )
