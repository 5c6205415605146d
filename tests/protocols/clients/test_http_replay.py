"""Recorded requests as HTTP requests of now."""

from __future__ import annotations

import json

import pytest

from kernel.records.recording_format import RecordedOutput, RecordedTensor, RequestRecord
from kernel.records.replay_target import ReplayedOutput, ReplayedResponse, ReplayFailed
from protocols.clients.http_replay import HttpReplayTarget, decode_infer_response, encode_infer_request, infer_path

INPUTS = [RecordedTensor("a", "UINT8", [2], 2, data=b"ab"), RecordedTensor("b", "FP32", [0])]


def test_a_plain_request_asks_for_all_outputs_as_binary() -> None:
    header, data = encode_infer_request(RequestRecord(1, 1, "m", 1, INPUTS))
    assert json.loads(header) == {
        "inputs": [
            {"name": "a", "shape": [2], "datatype": "UINT8", "parameters": {"binary_data_size": 2}},
            {"name": "b", "shape": [0], "datatype": "FP32", "parameters": {"binary_data_size": 0}},
        ],
        "parameters": {"binary_data_output": True},
    }
    assert data == b"ab"


def test_everything_that_the_client_asked_for_is_asked_for_again() -> None:
    request = RequestRecord(
        1, 1, "m", 1, [], id="x", outputs=[RecordedOutput("o", 3), RecordedOutput("p", 0, "region", 4, 8)],
        parameters={"own": True}, sequence_id="s", sequence_end=True, priority=2, timeout_us=5,
    )  # fmt: skip
    assert json.loads(encode_infer_request(request)[0]) == {
        "inputs": [], "id": "x",
        "outputs": [
            {"name": "o", "parameters": {"binary_data": True, "classification": 3}},
            {"name": "p", "parameters": {"binary_data": True}},
        ],
        "parameters": {
            "own": True, "sequence_id": "s", "sequence_start": False, "sequence_end": True, "priority": 2, "timeout": 5,
        },
    }  # fmt: skip


def test_the_path_has_the_version_that_the_client_asked_for() -> None:
    assert infer_path(RequestRecord(1, 1, "a/b", 4, [])) == "/v2/models/a%2Fb/infer"
    assert infer_path(RequestRecord(1, 1, "m", 4, [], wanted_version="3")) == "/v2/models/m/versions/3/infer"


def test_outputs_and_errors_of_responses_are_read() -> None:
    head = json.dumps({"outputs": [
        {"name": name, "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": 2}} for name in "ab"
    ]}).encode()  # fmt: skip
    assert decode_infer_response(head + b"xyzw", len(head)) == ReplayedResponse(
        [ReplayedOutput("a", "UINT8", [2], b"xy"), ReplayedOutput("b", "UINT8", [2], b"zw")]
    )
    assert decode_infer_response(b'{"error": "bad"}', 16) == ReplayedResponse(error="bad")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"outputs": [{"name": "a"}]}'])
def test_a_response_of_another_server_is_a_failure(body: bytes) -> None:
    with pytest.raises(ReplayFailed, match="not that of an inference server"):
        decode_infer_response(body, len(body))


@pytest.mark.anyio
async def test_a_server_that_is_not_there_is_named() -> None:
    target = HttpReplayTarget("http://127.0.0.1:1")
    try:
        with pytest.raises(ReplayFailed, match="no inference server responds to HTTP at http://127.0.0.1:1"):
            await target.check()
    finally:
        await target.close()
