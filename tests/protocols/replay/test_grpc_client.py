"""Recorded requests as gRPC messages of now."""

from __future__ import annotations

import pytest

from kernel.recording.format import RecordedOutput, RecordedTensor, RequestRecord
from kernel.recording.replayed import ReplayedOutput, ReplayedResponse, ReplayFailed
from protocols.grpc.generated import grpc_service_pb2 as messages
from protocols.replay.grpc_client import connect, decode_model_infer, encode_model_infer

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
    target = connect("http://127.0.0.1:1")
    try:
        with pytest.raises(ReplayFailed, match="no inference server responds to gRPC at http://127.0.0.1:1"):
            await target.check()
    finally:
        await target.close()
