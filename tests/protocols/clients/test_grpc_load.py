"""Frames of gRPC as a load process sends and counts them."""

from __future__ import annotations

import struct

import hpack
import pytest

from protocols.clients.grpc_load import GrpcLoadState, connect, fields, sequence_id_bytes
from protocols.clients.http_load import DONE, FAILED, INCOMPLETE
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.h2 import frames
from protocols.grpc.h2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame_header

SETTINGS = frames.settings([(frames.Setting.INITIAL_WINDOW_SIZE, 20_000)])


def block(*headers: tuple[str, str]) -> bytes:
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return encoder.encode(headers)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return frame_header(len(payload), kind, flags, stream) + payload


def message(encoded: bytes) -> bytes:
    return struct.pack(">BL", 0, len(encoded)) + encoded


def response(stream: int, body: bytes = b"\0" * 9, status: str = "0", text: str = "") -> bytes:
    head = frame(HEADERS, END_HEADERS, stream, block((":status", "200"), ("content-type", "application/grpc")))
    trailers = block(("grpc-status", status), ("grpc-message", text))
    return head + frame(DATA, 0, stream, body) + frame(HEADERS, END_HEADERS | END_STREAM, stream, trailers)


def started(*, streaming: bool = False, has_final: bool = False) -> GrpcLoadState:
    state = connect(b"head", streaming=streaming, has_final=has_final)
    assert state.pending.startswith(frames.PREFACE)
    state.pending = b""
    return state


def sent(data: bytes) -> list[tuple[int, int, int, int]]:
    """Return kind, flags, stream and size of the frames in `data`."""
    found, position = [], 0
    while position < len(data):
        high, low, kind, flags, stream = frames.FRAME_HEADER.unpack_from(data, position)
        found.append((kind, flags, stream, high << 8 | low))
        position += 9 + (high << 8 | low)
    return found


@pytest.mark.parametrize("size", [1, 13, 100_000])
def test_each_unary_call_has_a_stream_and_ends_with_its_status(size: int) -> None:
    state = started()
    for stream in (1, 3, 5):
        assert sent(state.begin(b"x" * 50)) == [
            (HEADERS, END_HEADERS, stream, 4),
            (DATA, END_STREAM, stream, 50),
        ]
        data = response(stream)
        outcomes = [state.feed(data[start : start + size]) for start in range(0, len(data), size)]
        assert (outcomes[-1], set(outcomes[:-1]) <= {INCOMPLETE}) == (DONE, True)
        assert state.responses == 1


def test_an_error_has_its_status_and_its_text() -> None:
    state = started()
    state.begin(b"x")
    only_trailers = block((":status", "200"), ("grpc-status", "14"), ("grpc-message", "model%20busy"))
    assert state.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, only_trailers)) == FAILED
    assert (state.error, state.usable) == ("gRPC status 14: model busy", True)


def test_a_large_message_waits_for_the_windows_of_the_server() -> None:
    state = started()
    state.feed(SETTINGS)
    assert frames.SETTINGS_ACK in state.pending
    first = sent(state.begin(b"x" * 100_000))
    assert [size for kind, _, _, size in first if kind == DATA] == [16384, 20_000 - 16384]
    assert state.feed(frames.window_update(1, 1_000_000)) == INCOMPLETE
    second = sent(state.more())
    assert sum(size for _, _, _, size in second) == 65_535 - 20_000
    state.feed(frames.window_update(0, 1_000_000))
    third = sent(state.more())
    assert sum(size for _, _, _, size in third) == 100_000 - 65_535
    assert [flags for _, flags, _, _ in third] == [0] * (len(third) - 1) + [END_STREAM]
    assert state.feed(response(1)) == DONE


def test_the_rest_of_a_large_response_can_be_skipped() -> None:
    state = started()
    state.begin(b"x")
    data = response(1, b"y" * 200_000)
    assert state.feed(data[:1000]) == INCOMPLETE
    left = state.left
    assert left > 100_000
    assert state.skip(left - 10) == INCOMPLETE
    assert state.feed(data[1000 + left - 10 :]) == DONE


def test_pings_are_acknowledged_and_goaway_ends_the_connection() -> None:
    state = started()
    state.begin(b"x")
    assert state.feed(frame(frames.PING, 0, 0, b"12345678")) == INCOMPLETE
    assert state.pending == frames.ping_ack(memoryview(b"12345678"))
    assert state.feed(frames.goaway(0, frames.H2ErrorCode.NO_ERROR, "age")) == FAILED
    assert (state.error, state.usable) == ("the server has ended the connection: age", False)


def stream_response(text: str = "", outputs: int = 1, final: bool | None = None) -> bytes:
    found = pb.ModelStreamInferResponse(error_message=text)
    if not text:
        for number in range(outputs):
            found.infer_response.outputs.add(name=f"OUT{number}")
        found.infer_response.model_name = "m"
        if final is not None:
            found.infer_response.parameters["triton_final_response"].bool_param = final
    return frame(DATA, 0, 1, message(found.SerializeToString()))


def test_a_stream_takes_one_request_after_the_other() -> None:
    state = started(streaming=True)
    assert [kind for kind, *_ in sent(state.begin(b"x"))] == [HEADERS, DATA]
    assert state.feed(stream_response()) == DONE
    assert sent(state.begin(b"x")) == [(DATA, 0, 1, 1)]
    data = stream_response()
    assert [state.feed(data[:20]), state.feed(data[20:])] == [INCOMPLETE, DONE]


def test_responses_of_a_decoupled_model_end_with_the_one_that_says_so() -> None:
    state = started(streaming=True, has_final=True)
    state.begin(b"x")
    assert state.feed(stream_response(final=False) * 3) == INCOMPLETE
    assert state.responses == 3
    assert state.feed(stream_response(outputs=0, final=True)) == DONE
    assert state.responses == 3
    state.begin(b"x")
    assert state.feed(stream_response(final=True)) == DONE
    assert state.responses == 1


def test_an_error_on_a_stream_fails_the_request_alone() -> None:
    state = started(streaming=True)
    state.begin(b"x")
    assert state.feed(stream_response("model broke")) == FAILED
    assert (state.error, state.usable) == ("model broke", True)


def test_a_stream_that_ends_is_a_failure() -> None:
    state = started(streaming=True)
    state.begin(b"x")
    trailers = frame(HEADERS, END_HEADERS | END_STREAM, 1, block(("grpc-status", "0")))
    assert state.feed(trailers) == FAILED
    assert not state.usable


def test_a_server_that_is_no_grpc_server_is_named() -> None:
    state = started()
    state.begin(b"x")
    assert state.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, block((":status", "404")))) == FAILED
    assert "status 404 of HTTP" in state.error


@pytest.mark.parametrize("number", [1, 127, 128, 1 << 48, (1 << 49) - 1])
def test_the_id_of_a_sequence_is_a_varint(number: int) -> None:
    assert sequence_id_bytes(number) in pb.InferParameter(int64_param=number).SerializeToString()


def test_fields_are_those_of_protobuf() -> None:
    encoded = pb.ModelInferRequest(model_name="m", id="1", raw_input_contents=[b"abc"]).SerializeToString()
    assert list(fields(encoded)) == [(1, b"m"), (3, b"1"), (7, b"abc")]
