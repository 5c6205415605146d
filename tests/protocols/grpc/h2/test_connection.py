"""A connection with h2 as its client: bytes however they are cut, mistakes in them, and waits that are too long."""

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
from tests.protocols.grpc.h2.client_frames import (
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


def test_trailers_of_a_request_end_it() -> None:
    connection = open_connection()
    feed(
        connection, request_headers(1) + request_headers(1, [("a", "b")], flags=frames.END_HEADERS | frames.END_STREAM)
    )
    assert take_events(connection.streams) == [(StreamEvent.OPENED, 1), (StreamEvent.READABLE, 1)]
    assert connection.streams.by_id[1].request_ended


def test_padding_priority_and_continuation_change_nothing() -> None:
    connection = open_connection()
    block = encode_block(FIELDS)
    head = bytes([3]) + bytes(5) + block[:10] + bytes(3)
    feed(
        connection,
        frame(frames.HEADERS, frames.PADDED | frames.PRIORITY_FLAG, 1, head)
        + frame(frames.CONTINUATION, 0, 1, block[10:20])
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:])
        + frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, bytes([2]) + message(b"abc") + bytes(2)),
    )
    assert list(connection.streams.by_id[1].message_reader.messages) == [b"abc"]


def test_how_bytes_are_cut_changes_nothing() -> None:
    octets = (
        CLIENT_PREFACE + request_headers(1) + frame(frames.DATA, frames.PADDED | 1, 1, b"\1" + message(b"abc") + b"\0")
    )
    connection = H2Connection()
    buffer = b""
    for octet in octets:
        buffer += bytes([octet])
        buffer = buffer[connection.receiving.receive(memoryview(buffer), 0) :]
    assert list(connection.streams.by_id[1].message_reader.messages) == [b"abc"]


def test_large_messages_are_received_where_they_belong() -> None:
    connection = open_connection()
    content = bytes(range(256)) * 2**12
    octets = message(content)
    feed(connection, request_headers(1) + frames.frame_header(len(octets) - 9, frames.DATA, 0, 1) + octets[:2000])
    buffer = connection.receiving.stream_frames.direct_buffer()
    assert buffer is not None
    assert len(buffer) == len(octets) - 2009
    buffer[:] = octets[2000:-9]
    connection.receiving.stream_frames.received_directly(len(buffer))
    assert connection.receiving.stream_frames.direct_buffer() is None
    feed(connection, frame(frames.DATA, frames.END_STREAM, 1, octets[-9:]))
    assert bytes(connection.streams.by_id[1].message_reader.messages[0]) == content  # type: ignore[arg-type]


def test_a_client_that_resets_its_call_is_heard() -> None:
    connection = open_connection()
    feed(connection, request_headers(1) + frames.rst_stream(1, H2ErrorCode.CANCEL))
    assert take_events(connection.streams) == [(StreamEvent.OPENED, 1), (StreamEvent.CLOSED, 1)]
    assert connection.streams.by_id == {}


def test_pings_and_settings_are_acknowledged() -> None:
    connection = open_connection()
    feed(connection, frame(frames.PING, 0, 0, b"12345678") + frames.settings([]) + frame(frames.PING, 1, 0, bytes(8)))
    assert sent_frames(connection.sending.write_queue) == [
        (frames.PING, 1, 0, b"12345678"),
        (frames.SETTINGS, 1, 0, b""),
    ]


def changed(**fields: str | None) -> list[tuple[str, str]]:
    """Return the fields of a request with pseudo fields and others changed, added, or left out for None."""
    named = {name.replace("pseudo_", ":").replace("_", "-"): value for name, value in fields.items()}
    kept = [(name, named.pop(name, value)) for name, value in FIELDS]
    return [(name, value) for name, value in (*kept, *named.items()) if value is not None]


@pytest.mark.parametrize(
    "fields",
    [
        changed(pseudo_method=None),
        changed(pseudo_path=None),
        changed(pseudo_path=""),
        changed(pseudo_scheme=None),
        [*FIELDS, (":method", "POST")],
        [(":path", "/"), *FIELDS],
        [(":status", "200"), *FIELDS],
        [*FIELDS, ("Upper", "case")],
        [*FIELDS, ("", "x")],
        changed(connection="close"),
        changed(transfer_encoding="chunked"),
        changed(upgrade="h2c"),
        changed(keep_alive="1"),
        changed(te="gzip"),
        changed(content_length="x"),
        changed(content_length="-1"),
        [*FIELDS, ("host", "a"), ("host", "b")],
        [*FIELDS, ("a", "b\r\nc: d")],
        [*FIELDS, ("a", "b\0")],
        [*FIELDS, ("a-bin", "x" * 5)],
    ],
)
def test_a_malformed_request_is_reset_and_others_go_on(fields: list[tuple[str, str]]) -> None:
    connection = open_connection()
    feed(connection, request_headers(1, fields) + request_headers(3))
    assert resets(connection.sending.write_queue) == [(1, H2ErrorCode.PROTOCOL_ERROR)]
    assert list(connection.streams.by_id) == [3]


def test_streams_over_the_limit_are_refused() -> None:
    connection = open_connection()
    last = 2 * limits.MAX_CONCURRENT_STREAMS + 1
    feed(connection, b"".join(request_headers(number) for number in range(1, last + 2, 2)))
    assert len(connection.streams.by_id) == limits.MAX_CONCURRENT_STREAMS
    assert resets(connection.sending.write_queue) == [(last, H2ErrorCode.REFUSED_STREAM)]
    assert not connection.sending.ended


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (frame(frames.DATA, 1, 1, b"more"), H2ErrorCode.STREAM_CLOSED),
        (request_headers(1, flags=5), H2ErrorCode.STREAM_CLOSED),
        (frames.window_update(1, 0), H2ErrorCode.PROTOCOL_ERROR),
        (frames.window_update(1, 2**31 - 1), H2ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
def test_mistakes_on_a_stream_whose_request_has_ended_reset_it(octets: bytes, code: H2ErrorCode) -> None:
    connection = open_connection()
    feed(connection, request_headers(1, flags=5) + octets)
    assert resets(connection.sending.write_queue) == [(1, code)]
    assert take_events(connection.streams) == [
        (StreamEvent.OPENED, 1),
        (StreamEvent.READABLE, 1),
        (StreamEvent.CLOSED, 1),
    ]
    assert not connection.sending.ended


def test_second_headers_that_do_not_end_the_request_reset_the_stream() -> None:
    connection = open_connection()
    feed(connection, request_headers(1) + request_headers(1))
    assert resets(connection.sending.write_queue) == [(1, H2ErrorCode.PROTOCOL_ERROR)]


def test_a_request_of_another_length_than_announced_is_malformed() -> None:
    connection = open_connection()
    feed(connection, request_headers(1, changed(content_length="9")) + frame(frames.DATA, 1, 1, message(b"abc")))
    assert resets(connection.sending.write_queue) == [(1, H2ErrorCode.PROTOCOL_ERROR)]


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (request_headers(2), H2ErrorCode.PROTOCOL_ERROR),
        (request_headers(0), H2ErrorCode.PROTOCOL_ERROR),
        (request_headers(5, flags=5) + request_headers(3), H2ErrorCode.STREAM_CLOSED),
        (frame(frames.DATA, 0, 0, b"x"), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 1, b"x"), H2ErrorCode.PROTOCOL_ERROR),
        (request_headers(1) + frame(frames.DATA, frames.PADDED, 1, b"\5abc"), H2ErrorCode.PROTOCOL_ERROR),
        (request_headers(1) + frame(frames.DATA, frames.PADDED, 1, b""), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 4 | frames.PADDED, 1, b"\xff" + BLOCK), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 4 | frames.PRIORITY_FLAG, 1, b"abc"), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.PING, 0, 0, bytes(8)), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.CONTINUATION, 4, 3), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.CONTINUATION, 4, 1, BLOCK), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\x0f"), H2ErrorCode.COMPRESSION_ERROR),
        (frame(frames.PUSH_PROMISE, 4, 1, bytes(4)), H2ErrorCode.PROTOCOL_ERROR),
        (frames.rst_stream(1, H2ErrorCode.CANCEL), H2ErrorCode.PROTOCOL_ERROR),
        (frames.window_update(1, 1), H2ErrorCode.PROTOCOL_ERROR),
        (frames.window_update(0, 0), H2ErrorCode.PROTOCOL_ERROR),
        (frames.window_update(0, 2**31 - 1), H2ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), H2ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PING, 0, 0, bytes(7)), H2ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PING, 0, 1, bytes(8)), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, bytes(5)), H2ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PRIORITY, 0, 1, bytes(4)), H2ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 1), H2ErrorCode.PROTOCOL_ERROR),
        (frame(frames.SETTINGS, 0, 0, bytes(5)), H2ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 1, 0, bytes(6)), H2ErrorCode.FRAME_SIZE_ERROR),
        (frames.settings([(Setting.ENABLE_PUSH, 2)]), H2ErrorCode.PROTOCOL_ERROR),
        (frames.settings([(Setting.INITIAL_WINDOW_SIZE, 2**31)]), H2ErrorCode.FLOW_CONTROL_ERROR),
        (frames.settings([(Setting.MAX_FRAME_SIZE, 100)]), H2ErrorCode.PROTOCOL_ERROR),
        (
            request_headers(1)
            + frames.window_update(1, 2**30)
            + frames.settings([(Setting.INITIAL_WINDOW_SIZE, 2**31 - 1)]),
            H2ErrorCode.FLOW_CONTROL_ERROR,
        ),
        (frames.frame_header(limits.MAX_FRAME_BYTE_SIZE + 1, frames.DATA, 0, 1), H2ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_mistakes_that_end_the_connection(octets: bytes, code: H2ErrorCode) -> None:
    connection = open_connection()
    feed(connection, octets)
    assert failure(connection) is code
    assert connection.streams.by_id == {}
    feed(connection, request_headers(101))
    assert sent_frames(connection.sending.write_queue) == []


@pytest.mark.parametrize(
    "octets",
    [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", frames.PREFACE + frame(frames.PING, 0, 0, bytes(8))],
)
def test_a_client_that_does_not_speak_http2_gets_goaway(octets: bytes) -> None:
    connection = H2Connection()
    feed(connection, octets)
    assert failure(connection) is H2ErrorCode.PROTOCOL_ERROR


def test_more_data_than_the_connection_window_is_an_error() -> None:
    connection = open_connection()
    feed(connection, request_headers(1) + request_headers(3) + request_headers(5))
    full = frames.frame_header(limits.MAX_FRAME_BYTE_SIZE, frames.DATA, 0, 0)[:5]
    # The windows do not open for messages that are not taken; each has its own prefix.
    content = message(bytes(limits.MAX_FRAME_BYTE_SIZE - 5))
    for index in range(limits.CONNECTION_WINDOW_BYTE_SIZE // limits.MAX_FRAME_BYTE_SIZE):
        number = 1 if index < limits.STREAM_WINDOW_BYTE_SIZE // limits.MAX_FRAME_BYTE_SIZE else 3
        feed(connection, full + number.to_bytes(4, "big") + content)
    assert not connection.sending.ended
    feed(connection, frame(frames.DATA, 0, 5, b"x"))
    assert failure(connection) is H2ErrorCode.FLOW_CONTROL_ERROR


def test_more_data_than_a_stream_window_resets_the_stream() -> None:
    connection = open_connection()
    feed(connection, request_headers(1))
    content = frame(frames.DATA, 0, 1, message(bytes(limits.MAX_FRAME_BYTE_SIZE - 5)))
    for _ in range(limits.STREAM_WINDOW_BYTE_SIZE // limits.MAX_FRAME_BYTE_SIZE):
        feed(connection, content)
    assert 1 in connection.streams.by_id
    feed(connection, frame(frames.DATA, 0, 1, b"x"))
    assert (1, H2ErrorCode.FLOW_CONTROL_ERROR) in resets(connection.sending.write_queue)
    assert not connection.sending.ended


def test_one_iteration_takes_a_limited_number_of_frames_and_leaves_the_rest() -> None:
    connection = open_connection()
    octets = memoryview(frame(frames.PING, 1, 0, bytes(8)) * 1000)
    assert connection.receiving.receive(octets, 0) == limits.FRAMES_PER_READ * 17
    assert connection.receiving.has_more


def test_unknown_frames_and_a_goaway_of_any_size_are_skipped() -> None:
    connection = open_connection()
    feed(connection, frame(0x42, 0, 1, bytes(100_000)) + frame(frames.GOAWAY, 0, 0, bytes(50_000)) + request_headers(1))
    assert list(connection.streams.by_id) == [1]


def test_what_a_client_still_sends_after_its_response_is_ignored() -> None:
    connection = open_connection()
    feed(connection, request_headers(1))
    connection.sending.send_trailers(connection.streams.by_id[1], status_trailers(3, "no"))
    assert resets(connection.sending.write_queue) == [(1, H2ErrorCode.NO_ERROR)]
    feed(connection, frame(frames.DATA, 0, 1, b"more") + request_headers(1, [("trailer", "x")], flags=5))
    assert not connection.sending.ended
