"""Requests and responses of `naiad infer` as gRPC messages."""

from __future__ import annotations

import pytest

from kernel.command.infer.arguments import GivenInput
from kernel.command.infer.connection import ClientError
from protocols.clients.grpc_infer import connect, decode_response, encode_request
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
    server = connect("127.0.0.1", 1, tls=False, model="m", version="")
    try:
        with pytest.raises(ClientError, match="no server responds to gRPC at 127.0.0.1:1: Connection refused"):
            server.metadata()
    finally:
        server.close()
