"""The state machine with h2 as its client, and frame by frame where h2 would not send such a thing.

One file for one machine: its tests share the makers of frames and the client below.
"""

from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest

from protocols.grpc.h2 import frames, limits
from protocols.grpc.h2.connection import H2Connection
from protocols.grpc.h2.frames import H2ErrorCode, Setting
from protocols.grpc.h2.headers import OK_TRAILERS_BLOCK, RESPONSE_BLOCK, encode_block, status_block
from protocols.grpc.h2.streams import Stream, StreamEvent
from protocols.grpc.h2.testing import CLIENT_PREFACE, FIELDS, frame, message, request_headers

SECOND = 10**9


def feed(machine: H2Connection, octets: bytes, now_ns: int = 0) -> None:
    """Hand `octets` in as a transport does, turn by turn."""
    rest = memoryview(octets)
    while True:
        rest = rest[machine.receiving.receive(rest, now_ns) :]
        if not machine.receiving.has_more:
            return


def greeted() -> H2Connection:
    machine = H2Connection()
    feed(machine, CLIENT_PREFACE)
    machine.sending.write_queue.take()
    return machine


def told(machine: H2Connection) -> list[tuple[int, int, int, bytes]]:
    """Return type, flags, stream and payload of every frame that the machine has put out."""
    octets = b"".join(machine.sending.write_queue.take())
    found = []
    while octets:
        high, low, kind, flags, number = frames.FRAME_HEADER.unpack_from(octets)
        end = 9 + (high << 8 | low)
        found.append((kind, flags, number, octets[9:end]))
        octets = octets[end:]
    return found


def resets(machine: H2Connection) -> list[tuple[int, H2ErrorCode]]:
    return [
        (number, H2ErrorCode(int.from_bytes(payload, "big")))
        for kind, _, number, payload in told(machine)
        if kind == frames.RST_STREAM
    ]


def failure(machine: H2Connection) -> H2ErrorCode:
    assert machine.sending.ended
    *_, (kind, _, number, payload) = told(machine)
    assert (kind, number) == (frames.GOAWAY, 0)
    return H2ErrorCode(int.from_bytes(payload[4:8], "big"))


def seen(machine: H2Connection) -> list[tuple[StreamEvent, int]]:
    events, machine.streams.events = machine.streams.events, []
    return [(event, stream.id) for event, stream in events]


class Client:
    """An h2 client that talks to a machine, and what it was told."""

    def __init__(self, settings: dict[h2.settings.SettingCodes | int, int] | None = None) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.machine = H2Connection()
        self.events: list[Any] = []
        self.h2.initiate_connection()
        if settings:
            self.h2.update_settings(settings)
        self.exchange()

    def exchange(self) -> None:
        """Carry bytes both ways until both sides are silent."""
        while True:
            to_server = self.h2.data_to_send()
            feed(self.machine, to_server)
            self.machine.sending.pump(2**20)
            to_client = b"".join(self.machine.sending.write_queue.take())
            if not to_server and not to_client:
                return
            self.events += self.h2.receive_data(to_client)

    def call(self, content: bytes, fields: list[tuple[str, str]] = FIELDS) -> Stream:
        """Send a call with one message and return the stream that the machine made of it."""
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, fields)
        rest = message(content)
        while rest:
            size = min(self.h2.local_flow_control_window(number), self.h2.max_outbound_frame_size, len(rest))
            self.h2.send_data(number, rest[:size], end_stream=size == len(rest))
            rest = rest[size:]
            self.exchange()
        return self.machine.streams.by_id[number]

    def answer(self, number: int) -> tuple[dict[str, str], bytes, dict[str, str]]:
        """Return headers, data and trailers that the client has got for a stream."""
        headers: dict[str, str] = {}
        trailers: dict[str, str] = {}
        data = b""
        for event in self.events:
            if getattr(event, "stream_id", None) != number:
                continue
            match event:
                case h2.events.ResponseReceived(headers=fields):
                    headers = {str(name): str(value) for name, value in fields}
                case h2.events.DataReceived(data=part):
                    data += part
                case h2.events.TrailersReceived(headers=fields):
                    trailers = {str(name): str(value) for name, value in fields}
        return headers, data, trailers


# ---- calls ----------------------------------------------------------------------------------


def give_back(machine: H2Connection) -> None:
    """Do what the transport does when it has nothing left to write."""
    for release in machine.sending.releases:
        release()
    machine.sending.releases.clear()


def test_a_call_is_received_and_answered() -> None:
    client = Client()
    stream = client.call(b"request")
    assert seen(client.machine) == [(StreamEvent.OPENED, 1), (StreamEvent.READABLE, 1)]
    assert stream.request_head.path == "/service/Method"
    assert list(stream.message_reader.messages) == [b"request"]
    released: list[bool] = []
    client.machine.sending.respond(stream, [b"ans", memoryview(b"wer")], lambda: released.append(True))
    client.exchange()
    headers, data, trailers = client.answer(1)
    assert headers == {":status": "200", "content-type": "application/grpc+proto"}
    assert data == message(b"answer")
    assert trailers == {"grpc-status": "0"}
    assert released == [True]
    assert client.machine.streams.by_id == {}


def test_a_message_larger_than_every_window_and_frame_comes_through() -> None:
    client = Client()
    content = bytes(range(256)) * (40 * 2**12)  # 40 MiB
    stream = client.call(content)
    assert bytes(stream.message_reader.messages[0]) == content


@pytest.mark.parametrize("byte_size", [2**16, 10**6])
def test_an_answer_larger_than_the_windows_leaves_as_they_open(byte_size: int) -> None:
    client = Client()
    stream = client.call(b"")
    content = bytes(byte_size)
    released: list[bool] = []
    client.machine.sending.respond(stream, [content], lambda: released.append(True))
    client.exchange()
    assert len(client.answer(1)[1]) == frames.DEFAULT_WINDOW_BYTE_SIZE
    assert client.machine.streams.by_id
    assert not released
    client.h2.increment_flow_control_window(byte_size, 1)
    client.h2.increment_flow_control_window(byte_size)
    client.exchange()
    _, data, trailers = client.answer(1)
    assert data == message(content)
    assert trailers == {"grpc-status": "0"}
    assert not released, "the transport may still have it"
    give_back(client.machine)
    assert released == [True]


def test_large_answers_take_turns() -> None:
    client = Client({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**20})
    client.h2.increment_flow_control_window(2**20)
    client.exchange()
    streams = [client.call(b"") for _ in range(2)]
    for stream in streams:
        client.machine.sending.respond(stream, [bytes(100_000)], lambda: None)
    client.machine.sending.pump(2**20)
    order = [number for kind, _, number, _ in told(client.machine) if kind == frames.DATA]
    assert order[:4] == [1, 3, 1, 3]


def test_an_answer_without_a_message_is_headers_alone() -> None:
    client = Client()
    stream = client.call(b"")
    client.machine.sending.send_trailers(stream, status_block(5, "no model 'é'"))
    client.exchange()
    headers, data, _ = client.answer(1)
    assert headers["grpc-status"] == "5"
    assert headers["grpc-message"] == "no model '%C3%A9'"
    assert data == b""


def test_a_client_that_is_still_sending_is_told_that_nobody_reads() -> None:
    machine = greeted()
    feed(machine, request_headers(1))
    machine.sending.send_trailers(machine.streams.by_id[1], status_block(3, "no"))
    assert resets(machine) == [(1, H2ErrorCode.NO_ERROR)]
    feed(machine, frame(frames.DATA, 0, 1, b"more") + request_headers(1, [("trailer", "x")], flags=5))
    assert not machine.sending.ended


def test_trailers_of_a_request_end_it() -> None:
    machine = greeted()
    feed(machine, request_headers(1) + request_headers(1, [("a", "b")], flags=frames.END_HEADERS | frames.END_STREAM))
    assert seen(machine) == [(StreamEvent.OPENED, 1), (StreamEvent.READABLE, 1)]
    assert machine.streams.by_id[1].request_ended


def test_padding_priority_and_continuation_change_nothing() -> None:
    machine = greeted()
    block = encode_block(FIELDS)
    head = bytes([3]) + bytes(5) + block[:10] + bytes(3)
    feed(
        machine,
        frame(frames.HEADERS, frames.PADDED | frames.PRIORITY_FLAG, 1, head)
        + frame(frames.CONTINUATION, 0, 1, block[10:20])
        + frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[20:])
        + frame(frames.DATA, frames.PADDED | frames.END_STREAM, 1, bytes([2]) + message(b"abc") + bytes(2)),
    )
    assert list(machine.streams.by_id[1].message_reader.messages) == [b"abc"]


def test_how_bytes_are_cut_changes_nothing() -> None:
    octets = (
        CLIENT_PREFACE + request_headers(1) + frame(frames.DATA, frames.PADDED | 1, 1, b"\1" + message(b"abc") + b"\0")
    )
    machine = H2Connection()
    buffer = b""
    for octet in octets:
        buffer += bytes([octet])
        buffer = buffer[machine.receiving.receive(memoryview(buffer), 0) :]
    assert list(machine.streams.by_id[1].message_reader.messages) == [b"abc"]


def test_large_messages_are_received_where_they_belong() -> None:
    machine = greeted()
    content = bytes(range(256)) * 2**12
    octets = message(content)
    feed(machine, request_headers(1) + frames.frame_header(len(octets) - 9, frames.DATA, 0, 1) + octets[:2000])
    buffer = machine.receiving.stream_frames.direct_buffer()
    assert buffer is not None
    assert len(buffer) == len(octets) - 2009
    buffer[:] = octets[2000:-9]
    machine.receiving.stream_frames.received_directly(len(buffer))
    assert machine.receiving.stream_frames.direct_buffer() is None
    feed(machine, frame(frames.DATA, frames.END_STREAM, 1, octets[-9:]))
    assert bytes(machine.streams.by_id[1].message_reader.messages[0]) == content


def test_a_client_that_resets_its_call_is_heard() -> None:
    machine = greeted()
    feed(machine, request_headers(1) + frames.rst_stream(1, H2ErrorCode.CANCEL))
    assert seen(machine) == [(StreamEvent.OPENED, 1), (StreamEvent.CLOSED, 1)]
    assert machine.streams.by_id == {}


def test_pings_and_settings_are_acknowledged() -> None:
    machine = greeted()
    feed(machine, frame(frames.PING, 0, 0, b"12345678") + frames.settings([]) + frame(frames.PING, 1, 0, bytes(8)))
    assert told(machine) == [(frames.PING, 1, 0, b"12345678"), (frames.SETTINGS, 1, 0, b"")]


def test_a_graceful_end_refuses_no_call_that_is_on_its_way() -> None:
    machine = greeted()
    machine.sending.go_away()
    assert told(machine) == [(frames.GOAWAY, 0, 0, bytes.fromhex("7fffffff00000000"))]
    feed(machine, request_headers(1))
    assert 1 in machine.streams.by_id


def test_a_smaller_window_holds_a_stream_until_it_is_open_again() -> None:
    machine = greeted()
    feed(machine, request_headers(1, flags=5))
    feed(machine, frames.settings([(Setting.INITIAL_WINDOW_SIZE, 0)]))
    machine.sending.respond(machine.streams.by_id[1], [b"abc"], lambda: None)
    assert not machine.sending.pump(2**20)
    assert [kind for kind, *_ in told(machine)] == [frames.SETTINGS, frames.HEADERS]
    feed(machine, frames.settings([(Setting.INITIAL_WINDOW_SIZE, 3)]))
    machine.sending.pump(2**20)
    feed(machine, frames.window_update(1, 100))
    machine.sending.pump(2**20)
    assert told(machine) == [
        (frames.SETTINGS, 1, 0, b""),
        (frames.DATA, 0, 1, message(b"abc")[:3]),
        (frames.DATA, 0, 1, message(b"abc")[3:]),
        (frames.HEADERS, 5, 1, OK_TRAILERS_BLOCK),
    ]


def test_a_call_that_fails_while_its_message_leaves_is_told_at_once() -> None:
    machine = greeted()
    feed(machine, frames.settings([(Setting.INITIAL_WINDOW_SIZE, 3)]) + request_headers(1, flags=5))
    stream = machine.streams.by_id[1]
    machine.sending.send_headers(stream, RESPONSE_BLOCK)
    released: list[bool] = []
    machine.sending.send_data(stream, [message(b"abc")], lambda: released.append(True))
    machine.sending.pump(2**20)
    machine.sending.write_queue.take()
    machine.sending.drop_data(stream)
    assert not released, "what was taken may not have left yet"
    give_back(machine)
    assert released == [True]
    machine.sending.send_trailers(stream, OK_TRAILERS_BLOCK)
    assert told(machine) == [(frames.HEADERS, 5, 1, OK_TRAILERS_BLOCK)]
    assert not machine.streams.by_id


def test_headers_too_large_for_a_frame_are_continued() -> None:
    machine = greeted()
    feed(machine, request_headers(1, flags=5))
    machine.sending.send_trailers(machine.streams.by_id[1], RESPONSE_BLOCK + bytes(2**15))
    assert [(kind, flags) for kind, flags, *_ in told(machine)] == [(1, 1), (9, 0), (9, 4)]


# ---- mistakes -------------------------------------------------------------------------------


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
        [*FIELDS, ("a", " b")],
        [*FIELDS, ("a-bin", "x" * 5)],
    ],
)
def test_a_malformed_request_is_reset_and_others_go_on(fields: list[tuple[str, str]]) -> None:
    machine = greeted()
    feed(machine, request_headers(1, fields) + request_headers(3))
    assert resets(machine) == [(1, H2ErrorCode.PROTOCOL_ERROR)]
    assert list(machine.streams.by_id) == [3]


def test_streams_over_the_limit_are_refused() -> None:
    machine = greeted()
    last = 2 * limits.MAX_CONCURRENT_STREAMS + 1
    feed(machine, b"".join(request_headers(number) for number in range(1, last + 2, 2)))
    assert len(machine.streams.by_id) == limits.MAX_CONCURRENT_STREAMS
    assert resets(machine) == [(last, H2ErrorCode.REFUSED_STREAM)]
    assert not machine.sending.ended


@pytest.mark.parametrize(
    ("octets", "code"),
    [
        (frame(frames.DATA, 1, 1, b"more"), H2ErrorCode.STREAM_CLOSED),
        (request_headers(1, flags=5), H2ErrorCode.STREAM_CLOSED),
        (frames.window_update(1, 0), H2ErrorCode.PROTOCOL_ERROR),
        (frames.window_update(1, 2**31 - 1), H2ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
def test_mistakes_on_a_stream_that_has_ended_its_request_reset_it(octets: bytes, code: H2ErrorCode) -> None:
    machine = greeted()
    feed(machine, request_headers(1, flags=5) + octets)
    assert resets(machine) == [(1, code)]
    assert seen(machine) == [(StreamEvent.OPENED, 1), (StreamEvent.READABLE, 1), (StreamEvent.CLOSED, 1)]
    assert not machine.sending.ended


def test_headers_that_end_nothing_reset_their_stream() -> None:
    machine = greeted()
    feed(machine, request_headers(1) + request_headers(1))
    assert resets(machine) == [(1, H2ErrorCode.PROTOCOL_ERROR)]


def test_a_body_of_another_length_than_announced_is_malformed() -> None:
    machine = greeted()
    feed(machine, request_headers(1, changed(content_length="9")) + frame(frames.DATA, 1, 1, message(b"abc")))
    assert resets(machine) == [(1, H2ErrorCode.PROTOCOL_ERROR)]


BLOCK = encode_block(FIELDS)


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
    machine = greeted()
    feed(machine, octets)
    assert failure(machine) is code
    assert machine.streams.by_id == {}
    feed(machine, request_headers(101))
    assert told(machine) == []


@pytest.mark.parametrize(
    "octets",
    [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", frames.PREFACE + frame(frames.PING, 0, 0, bytes(8))],
)
def test_who_does_not_speak_http2_is_sent_away(octets: bytes) -> None:
    machine = H2Connection()
    feed(machine, octets)
    assert failure(machine) is H2ErrorCode.PROTOCOL_ERROR


def test_more_data_than_the_connection_window_is_an_error() -> None:
    machine = greeted()
    feed(machine, request_headers(1) + request_headers(3) + request_headers(5))
    full = frames.frame_header(limits.MAX_FRAME_BYTE_SIZE, frames.DATA, 0, 0)[:5]
    # Messages that nobody takes are not given back; each has its own prefix.
    content = message(bytes(limits.MAX_FRAME_BYTE_SIZE - 5))
    for index in range(limits.CONNECTION_WINDOW_BYTE_SIZE // limits.MAX_FRAME_BYTE_SIZE):
        number = 1 if index < limits.STREAM_WINDOW_BYTE_SIZE // limits.MAX_FRAME_BYTE_SIZE else 3
        feed(machine, full + number.to_bytes(4, "big") + content)
    assert not machine.sending.ended
    feed(machine, frame(frames.DATA, 0, 5, b"x"))
    assert failure(machine) is H2ErrorCode.FLOW_CONTROL_ERROR


def test_more_data_than_a_stream_window_resets_the_stream() -> None:
    machine = greeted()
    feed(machine, request_headers(1))
    content = frame(frames.DATA, 0, 1, message(bytes(limits.MAX_FRAME_BYTE_SIZE - 5)))
    for _ in range(limits.STREAM_WINDOW_BYTE_SIZE // limits.MAX_FRAME_BYTE_SIZE):
        feed(machine, content)
    assert 1 in machine.streams.by_id
    feed(machine, frame(frames.DATA, 0, 1, b"x"))
    assert (1, H2ErrorCode.FLOW_CONTROL_ERROR) in resets(machine)
    assert not machine.sending.ended


# ---- floods ---------------------------------------------------------------------------------


def rapid_resets(count: int) -> bytes:
    return b"".join(request_headers(2 * n + 1) + frames.rst_stream(2 * n + 1, H2ErrorCode.CANCEL) for n in range(count))


@pytest.mark.parametrize(
    ("flood", "allowed"),
    [
        (rapid_resets, 1000),
        (lambda count: b"".join(request_headers(2 * n + 1, [("a", "b")]) for n in range(count)), 1000),
        (lambda count: frames.settings([]) * count, 99),
        (lambda count: frame(frames.PING, 0, 0, bytes(8)) * count, 100),
        (lambda count: frame(frames.PRIORITY, 0, 1, bytes(5)) * count, 1000),
        (lambda count: frame(0x42, 0, 1, b"unknown") * count, 1000),
        (lambda count: request_headers(1) + frame(frames.DATA, 0, 1) * count, 100),
        (lambda count: frame(frames.HEADERS, 0, 1, BLOCK) + frame(frames.CONTINUATION, 0, 1) * count, 8),
    ],
)
def test_a_flood_ends_the_connection(flood: Callable[[int], bytes], allowed: int) -> None:
    machine = greeted()
    feed(machine, flood(allowed))
    assert not machine.sending.ended
    machine = greeted()
    feed(machine, flood(allowed + 1))
    assert failure(machine) is H2ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "octets",
    [
        frames.settings([(Setting.HEADER_TABLE_SIZE, 1)] * (limits.MAX_SETTINGS_ENTRIES + 1)),
        frames.frame_header(limits.MAX_HEADER_BLOCK_BYTE_SIZE * 2, frames.HEADERS, 4, 1),
        frame(frames.HEADERS, 0, 1, bytes(16_000)) + frame(frames.CONTINUATION, 0, 1, bytes(16_000)),
        # One entry of 4 KiB in the table, and many references to it.
        frame(frames.HEADERS, 4, 1, b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4000 + b"\xbe" * 1000),
    ],
)
def test_what_would_grow_beyond_measure_ends_the_connection(octets: bytes) -> None:
    machine = greeted()
    feed(machine, octets)
    assert failure(machine) is H2ErrorCode.ENHANCE_YOUR_CALM


def test_pings_at_a_calm_pace_go_on_for_ever() -> None:
    machine = greeted()
    for second in range(1000):
        feed(machine, frame(frames.PING, 0, 0, bytes(8)) * 50, second * SECOND)
    assert not machine.sending.ended


def test_a_turn_takes_so_many_frames_and_leaves_the_rest() -> None:
    machine = greeted()
    octets = memoryview(frame(frames.PING, 1, 0, bytes(8)) * 1000)
    assert machine.receiving.receive(octets, 0) == limits.FRAMES_PER_ITERATION * 17
    assert machine.receiving.has_more


def test_unknown_frames_and_a_goaway_of_any_size_are_skipped() -> None:
    machine = greeted()
    feed(machine, frame(0x42, 0, 1, bytes(100_000)) + frame(frames.GOAWAY, 0, 0, bytes(50_000)) + request_headers(1))
    assert list(machine.streams.by_id) == [1]


# ---- patience -------------------------------------------------------------------------------


@pytest.mark.parametrize("octets", [b"", frames.PREFACE[:5], CLIENT_PREFACE + frame(frames.HEADERS, 0, 1, BLOCK)])
def test_a_slow_handshake_or_header_block_is_not_waited_for(octets: bytes) -> None:
    machine = H2Connection()
    feed(machine, octets)
    machine.check_progress(0)
    machine.check_progress(limits.HANDSHAKE_TIMEOUT_S * SECOND - 1)
    assert not machine.sending.ended
    machine.check_progress(limits.HANDSHAKE_TIMEOUT_S * SECOND)
    assert failure(machine) is H2ErrorCode.PROTOCOL_ERROR


def test_an_answer_that_its_client_does_not_let_through_is_dropped() -> None:
    machine = greeted()
    feed(machine, frames.settings([(Setting.INITIAL_WINDOW_SIZE, 0)]) + request_headers(1, flags=5))
    released: list[bool] = []
    machine.sending.respond(machine.streams.by_id[1], [b"abc"], lambda: released.append(True))
    machine.sending.pump(2**20)
    machine.check_progress(0)
    assert not released
    machine.check_progress(limits.PROGRESS_TIMEOUT_S * SECOND)
    give_back(machine)
    assert released == [True]
    assert resets(machine) == [(1, H2ErrorCode.CANCEL)]
    assert seen(machine)[-1] == (StreamEvent.CLOSED, 1)
