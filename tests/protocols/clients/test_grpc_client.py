"""Requests of `naiad infer` and recorded requests as gRPC messages, and what becomes of the responses."""

from __future__ import annotations

import pytest

from kernel.records.recording_format import RecordedOutput, RecordedTensor, RequestRecord
from kernel.records.replay_target import ReplayedOutput, ReplayedResponse, ReplayFailed
from kernel.tools.client import ClientError
from kernel.tools.infer_arguments import GivenInput
from protocols.clients.grpc_client import (
    GrpcInferServer,
    GrpcReplayTarget,
    decode_model_infer,
    decode_response,
    encode_model_infer,
    encode_request,
)
from protocols.grpc.generated import grpc_service_pb2 as messages


def test_a_request_has_raw_inputs_and_asks_for_classes() -> None:
    inputs = [GivenInput("A", "FP16", [2], [1, 2], b"abcd"), GivenInput("B", "INT8", [0], [], b"")]
    outputs = [{"name": "O", "parameters": {"binary_data": True, "classification": 3}}, {"name": "P", "parameters": {}}]
    message = encode_request("m", "2", inputs, outputs)
    assert (message.model_name, message.model_version) == ("m", "2")
    assert [(each.name, each.datatype, list(each.shape)) for each in message.inputs] == [
        ("A", "FP16", [2]), ("B", "INT8", [0]),
    ]  # fmt: skip
    assert list(message.raw_input_contents) == [b"abcd", b""]
    assert [(each.name, dict(each.parameters)) for each in message.outputs][1] == ("P", {})
    assert message.outputs[0].parameters["classification"].int64_param == 3


def test_a_response_becomes_that_of_http() -> None:
    message = messages.ModelInferResponse(raw_output_contents=[b"xy", b""])
    message.outputs.add(name="A", datatype="UINT8", shape=[2])
    message.outputs.add(name="B", datatype="FP32", shape=[0])
    json, binary = decode_response(message)
    assert binary == b"xy"
    assert json["outputs"] == [
        {"name": "A", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}},
        {"name": "B", "datatype": "FP32", "shape": [0], "parameters": {"binary_data_size": 0}},
    ]
    message.outputs.add(name="C", datatype="UINT8", shape=[2])
    with pytest.raises(ClientError, match="not in raw_output_contents"):
        decode_response(message)


def test_a_server_that_is_not_there_is_one_line() -> None:
    server = GrpcInferServer("127.0.0.1", 1, tls=False, model="m", version="")
    try:
        with pytest.raises(ClientError, match="no server responds to gRPC at 127.0.0.1:1: Connection refused"):
            server.metadata()
    finally:
        server.close()


INPUTS = [RecordedTensor("a", "UINT8", [2], 2, data=b"ab"), RecordedTensor("b", "FP32", [0])]


def test_everything_that_the_client_asked_for_is_asked_for_again() -> None:
    request = RequestRecord(
        1, 1, "m", 4, INPUTS, wanted_version="3", id="x", outputs=[RecordedOutput("o", 3), RecordedOutput("p")],
        parameters={"b": True, "i": -1, "u": 1 << 63, "f": 0.5, "s": "t"}, sequence_id=7, sequence_start=True,
        priority=2, timeout_us=5,
    )  # fmt: skip
    message = encode_model_infer(request)
    assert (message.model_name, message.model_version, message.id) == ("m", "3", "x")
    assert [(each.name, each.datatype, list(each.shape)) for each in message.inputs] == [
        ("a", "UINT8", [2]), ("b", "FP32", [0]),
    ]  # fmt: skip
    assert list(message.raw_input_contents) == [b"ab", b""]
    assert [(each.name, each.parameters["classification"].int64_param) for each in message.outputs] == [
        ("o", 3), ("p", 0),
    ]  # fmt: skip
    kinds = {name: (value.WhichOneof("parameter_choice"), getattr(value, value.WhichOneof("parameter_choice") or ""))
             for name, value in message.parameters.items()}  # fmt: skip
    assert kinds == {
        "b": ("bool_param", True), "i": ("int64_param", -1), "u": ("uint64_param", 1 << 63), "f": ("double_param", 0.5),
        "s": ("string_param", "t"), "sequence_id": ("int64_param", 7), "sequence_start": ("bool_param", True),
        "sequence_end": ("bool_param", False), "priority": ("int64_param", 2), "timeout": ("int64_param", 5),
    }  # fmt: skip


def test_outputs_are_read() -> None:
    message = messages.ModelInferResponse(raw_output_contents=[b"xy"])
    message.outputs.add(name="a", datatype="UINT8", shape=[2])
    assert decode_model_infer(message) == ReplayedResponse([ReplayedOutput("a", "UINT8", [2], b"xy")])
    message.outputs.add(name="b", datatype="UINT8", shape=[2])
    with pytest.raises(ReplayFailed, match="not in raw_output_contents"):
        decode_model_infer(message)


@pytest.mark.anyio
async def test_a_server_that_is_not_there_is_named() -> None:
    target = GrpcReplayTarget("http://127.0.0.1:1")
    try:
        with pytest.raises(ReplayFailed, match="no inference server responds to gRPC at http://127.0.0.1:1"):
            await target.check()
    finally:
        await target.close()
