"""A connection with h2 as its client, and what waits too long in it."""

from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import H2ErrorCode, Setting
from protocols.grpc.h2.headers import OK_TRAILERS, OK_TRAILERS_BLOCK, RESPONSE_BLOCK, encode_block, status_trailers
from protocols.grpc.h2.streams import Stream, StreamEvent
from protocols.grpc.h2.testing import (
    CLIENT_PREFACE,
    FIELDS,
    failure,
    feed,
    frame,
    message,
    open_connection,
    request_headers,
    resets,
    sent_frames,
    take_events,
)

SECOND = 10**9

BLOCK = encode_block(FIELDS)


class Client:
    """An h2 client of a connection, and the events that it has got."""

    def __init__(self, settings: dict[h2.settings.SettingCodes | int, int] | None = None) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.connection = H2Connection()
        self.events: list[Any] = []
        self.h2.initiate_connection()
        if settings:
            self.h2.update_settings(settings)
        self.exchange()

    def exchange(self) -> None:
        """Carry bytes both ways until both sides are silent."""
        while True:
            to_server = self.h2.data_to_send()
            feed(self.connection, to_server)
            self.connection.sending.pump(2**20)
            to_client = b"".join(self.connection.sending.write_queue.take())
            if not to_server and not to_client:
                return
            self.events += self.h2.receive_data(to_client)

    def call(self, content: bytes, fields: list[tuple[str, str]] = FIELDS) -> Stream:
        """Send a call with one message and return the stream that the connection made of it."""
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream_id, fields)
        rest = message(content)
        while rest:
            size = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size, len(rest))
            self.h2.send_data(stream_id, rest[:size], end_stream=size == len(rest))
            rest = rest[size:]
            self.exchange()
        return self.connection.streams.by_id[stream_id]

    def response(self, stream_id: int) -> tuple[dict[str, str], bytes, dict[str, str]]:
        """Return headers, data and trailers that the client has got for a stream."""
        headers: dict[str, str] = {}
        trailers: dict[str, str] = {}
        data = b""
        for event in self.events:
            if getattr(event, "stream_id", None) != stream_id:
                continue
            match event:
                case h2.events.ResponseReceived(headers=fields):
                    headers = {str(name): str(value) for name, value in fields}
                case h2.events.DataReceived(data=part):
                    data += part
                case h2.events.TrailersReceived(headers=fields):
                    trailers = {str(name): str(value) for name, value in fields}
        return headers, data, trailers


def call_releases(connection: H2Connection) -> None:
    """Do what the transport does when it has nothing left to write."""
    for release in connection.sending.releases:
        release()
    connection.sending.releases.clear()


def test_a_call_is_received_and_gets_its_response() -> None:
    client = Client()
    stream = client.call(b"request")
    assert take_events(client.connection.streams) == [(StreamEvent.OPENED, 1), (StreamEvent.READABLE, 1)]
    assert stream.request_head.path == "/service/Method"
    assert list(stream.message_reader.messages) == [b"request"]
    released: list[bool] = []
    client.connection.sending.respond(stream, [b"resp", memoryview(b"onse")], lambda: released.append(True))
    client.exchange()
    headers, data, trailers = client.response(1)
    assert headers == {":status": "200", "content-type": "application/grpc+proto"}
    assert data == message(b"response")
    assert trailers == {"grpc-status": "0"}
    assert released == [True]
    assert client.connection.streams.by_id == {}


def test_a_message_larger_than_every_window_and_frame_arrives() -> None:
    client = Client()
    content = bytes(range(256)) * (40 * 2**12)  # 40 MiB
    stream = client.call(content)
    assert bytes(stream.message_reader.messages[0]) == content  # type: ignore[arg-type]


@pytest.mark.parametrize("byte_size", [2**16, 10**6])
def test_a_response_larger_than_the_windows_leaves_as_they_open(byte_size: int) -> None:
    client = Client()
    stream = client.call(b"")
    content = bytes(byte_size)
    released: list[bool] = []
    client.connection.sending.respond(stream, [content], lambda: released.append(True))
    client.exchange()
    assert len(client.response(1)[1]) == frames.DEFAULT_WINDOW_BYTE_SIZE
    assert client.connection.streams.by_id
    assert not released
    client.h2.increment_flow_control_window(byte_size, 1)
    client.h2.increment_flow_control_window(byte_size)
    client.exchange()
    _, data, trailers = client.response(1)
    assert data == message(content)
    assert trailers == {"grpc-status": "0"}
    assert not released, "the transport may still have it"
    call_releases(client.connection)
    assert released == [True]


def test_large_responses_send_one_frame_each_in_turn() -> None:
    client = Client({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**20})
    client.h2.increment_flow_control_window(2**20)
    client.exchange()
    streams = [client.call(b"") for _ in range(2)]
    for stream in streams:
        client.connection.sending.respond(stream, [bytes(100_000)], lambda: None)
    client.connection.sending.pump(2**20)
    sent = sent_frames(client.connection.sending.write_queue)
    order = [stream_id for frame_type, _, stream_id, _ in sent if frame_type == frames.DATA]
    assert order[:4] == [1, 3, 1, 3]


def test_a_response_without_a_message_is_headers_alone() -> None:
    client = Client()
    stream = client.call(b"")
    client.connection.sending.send_trailers(stream, status_trailers(5, "no model 'é'"))
    client.exchange()
    headers, data, _ = client.response(1)
    assert headers["grpc-status"] == "5"
    assert headers["grpc-message"] == "no model '%C3%A9'"
    assert data == b""


def test_a_graceful_end_refuses_no_call_that_is_on_its_way() -> None:
    connection = open_connection()
    connection.sending.go_away()
    assert sent_frames(connection.sending.write_queue) == [(frames.GOAWAY, 0, 0, bytes.fromhex("7fffffff00000000"))]
    feed(connection, request_headers(1))
    assert 1 in connection.streams.by_id


def test_a_smaller_window_holds_a_stream_until_it_is_open_again() -> None:
    connection = open_connection()
    feed(connection, request_headers(1, flags=5))
    feed(connection, frames.settings([(Setting.INITIAL_WINDOW_SIZE, 0)]))
    connection.sending.respond(connection.streams.by_id[1], [b"abc"], lambda: None)
    assert not connection.sending.pump(2**20)
    assert [frame_type for frame_type, *_ in sent_frames(connection.sending.write_queue)] == [
        frames.SETTINGS,
        frames.HEADERS,
    ]
    feed(connection, frames.settings([(Setting.INITIAL_WINDOW_SIZE, 3)]))
    connection.sending.pump(2**20)
    feed(connection, frames.window_update(1, 100))
    connection.sending.pump(2**20)
    assert sent_frames(connection.sending.write_queue) == [
        (frames.SETTINGS, 1, 0, b""),
        (frames.DATA, 0, 1, message(b"abc")[:3]),
        (frames.DATA, 0, 1, message(b"abc")[3:]),
        (frames.HEADERS, 5, 1, OK_TRAILERS_BLOCK),
    ]


def test_a_call_that_fails_while_its_message_leaves_gets_its_status_at_once() -> None:
    connection = open_connection()
    feed(connection, frames.settings([(Setting.INITIAL_WINDOW_SIZE, 3)]) + request_headers(1, flags=5))
    stream = connection.streams.by_id[1]
    connection.sending.send_headers(stream, RESPONSE_BLOCK)
    released: list[bool] = []
    connection.sending.send_data(stream, [message(b"abc")], lambda: released.append(True))
    connection.sending.pump(2**20)
    connection.sending.write_queue.take()
    connection.sending.drop_data(stream)
    assert not released, "what was taken may not have left yet"
    call_releases(connection)
    assert released == [True]
    connection.sending.send_trailers(stream, OK_TRAILERS)
    assert sent_frames(connection.sending.write_queue) == [(frames.HEADERS, 5, 1, OK_TRAILERS_BLOCK)]
    assert not connection.streams.by_id


@pytest.mark.parametrize("octets", [b"", frames.PREFACE[:5], CLIENT_PREFACE + frame(frames.HEADERS, 0, 1, BLOCK)])
def test_a_slow_handshake_or_header_block_is_not_waited_for(octets: bytes) -> None:
    connection = H2Connection()
    feed(connection, octets)
    connection.check_progress(0)
    connection.check_progress(limits.HANDSHAKE_TIMEOUT_S * SECOND - 1)
    assert not connection.sending.ended
    connection.check_progress(limits.HANDSHAKE_TIMEOUT_S * SECOND)
    assert failure(connection) is H2ErrorCode.PROTOCOL_ERROR


def test_a_response_that_its_client_does_not_let_through_is_dropped() -> None:
    connection = open_connection()
    feed(connection, frames.settings([(Setting.INITIAL_WINDOW_SIZE, 0)]) + request_headers(1, flags=5))
    released: list[bool] = []
    connection.sending.respond(connection.streams.by_id[1], [b"abc"], lambda: released.append(True))
    connection.sending.pump(2**20)
    connection.check_progress(0)
    assert not released
    connection.check_progress(limits.PROGRESS_TIMEOUT_S * SECOND)
    call_releases(connection)
    assert released == [True]
    assert resets(connection.sending.write_queue) == [(1, H2ErrorCode.CANCEL)]
    assert take_events(connection.streams)[-1] == (StreamEvent.CLOSED, 1)
