"""The record of the streams of a connection."""

import pytest

from protocols.grpc.framing import MessageReader
from protocols.grpc.h2.headers import request_head
from protocols.grpc.h2.limits import STREAM_WINDOW_BYTE_SIZE
from protocols.grpc.h2.states import StreamState
from protocols.grpc.h2.streams import Stream, Streams
from tests.protocols.grpc.h2.client_frames import FIELDS


def opened(*stream_ids: int) -> Streams:
    streams = Streams()
    for stream_id in stream_ids:
        streams.by_id[stream_id] = Stream(stream_id, request_head(FIELDS), 100)
        streams.last_id = stream_id
    return streams


def test_ids_above_the_last_request_are_idle_and_those_below_closed() -> None:
    streams = opened(3, 7)
    states = [streams.state_of(stream_id) for stream_id in (1, 3, 5, 7, 9)]
    closed, is_open, idle = StreamState.CLOSED, StreamState.OPEN, StreamState.IDLE
    assert states == [closed, is_open, closed, is_open, idle]


def test_a_stream_that_the_server_has_reset_is_known_for_a_while() -> None:
    streams = opened(999)
    streams.note_reset(3)
    assert streams.state_of(3) is StreamState.RESET
    for stream_id in range(5, 5 + 2 * 128, 2):
        streams.note_reset(stream_id)
    assert streams.state_of(3) is StreamState.CLOSED, "clients cannot make the server remember without end"


@pytest.mark.parametrize(
    ("state", "is_open"),
    [(StreamState.OPEN, True), (StreamState.HALF_CLOSED_REMOTE, True), (StreamState.CLOSED, False)],
)
def test_a_stream_is_open_until_it_is_closed(state: StreamState, is_open: bool) -> None:
    assert Stream(1, request_head(FIELDS), 100, state).is_open is is_open


def test_the_reader_of_a_complete_call_has_its_message() -> None:
    stream = Stream(1, request_head(FIELDS), 100, StreamState.HALF_CLOSED_REMOTE, b"message")
    assert isinstance(stream.message_reader, MessageReader)
    assert list(stream.message_reader.messages) == [b"message"]
    assert stream.complete_message is None, "it is in one place only"
    assert stream.message_reader is stream.message_reader


def test_the_window_of_a_stream_is_its_own() -> None:
    stream = Stream(1, request_head(FIELDS), 100)
    assert stream.receive_window.take(STREAM_WINDOW_BYTE_SIZE)
    assert not stream.receive_window.take(1)


@pytest.mark.parametrize(
    ("announced", "received", "differs"), [(None, 5, False), ("5", 5, False), ("5", 4, True), ("0", 1, True)]
)
def test_a_request_has_the_length_that_it_announced(announced: str | None, received: int, differs: bool) -> None:
    fields = FIELDS if announced is None else [*FIELDS, ("content-length", announced)]
    stream = Stream(1, request_head(fields), 100, received_byte_size=received)
    assert stream.has_other_length_than_announced() is differs
