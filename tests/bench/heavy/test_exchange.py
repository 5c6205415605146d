"""The state of an attacker's connection over HTTP and over gRPC, without sockets."""

from __future__ import annotations

import struct

import hpack
import pytest

from bench.heavy.attack import GrpcCall, HttpRequest
from bench.heavy.exchange import Exchange, GrpcExchange, HttpExchange, chunked
from bench.load import (
    ACK,
    CLIENT_PREFACE,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
)


def sent(exchange: Exchange) -> bytes:
    """Take all that may be sent now."""
    taken = b""
    while (part := exchange.to_send()) is not None:
        taken += part
        exchange.sent(len(part))
    return taken


def response(status: int, body: bytes = b"", more: str = "") -> bytes:
    return f"HTTP/1.1 {status} X\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_request_is_sent_and_its_response_read_in_any_parts() -> None:
    exchange = HttpExchange([HttpRequest("/a", b"body", {"X-A": "1"})])
    assert sent(exchange) == b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nX-A: 1\r\n\r\nbody"
    for byte in response(400, b"wrong"):
        assert not exchange.finished
        exchange.receive(bytes([byte]))
    assert exchange.finished
    assert (exchange.statuses, exchange.texts, exchange.response_byte_size) == (["400"], ["wrong"], 5)


def test_a_chunked_response_ends_with_its_last_chunk() -> None:
    exchange = HttpExchange([HttpRequest("/a", b"")])
    exchange.receive(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r")
    assert not exchange.finished
    exchange.receive(b"\n\r\n")
    assert exchange.statuses == ["200"]


def test_a_body_is_sent_in_chunks() -> None:
    assert chunked(b"abcde", 2) == b"2\r\nab\r\n2\r\ncd\r\n1\r\ne\r\n0\r\n\r\n"
    assert sent(HttpExchange([HttpRequest("/a", b"ab", chunk_byte_size=2)])).endswith(
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    )


def test_a_body_waits_for_100_continue() -> None:
    exchange = HttpExchange([HttpRequest("/a", b"body", expects_continue=True)])
    assert sent(exchange).endswith(b"Expect: 100-continue\r\n\r\n")
    exchange.receive(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert sent(exchange) == b"body"
    exchange.receive(response(200))
    assert exchange.statuses == ["200"]


def test_requests_follow_one_another_and_end_with_one_that_is_refused_on_its_way() -> None:
    exchange = HttpExchange([HttpRequest("/a", b"1"), HttpRequest("/b", b"2"), HttpRequest("/c", b"3")])
    assert sent(exchange).startswith(b"POST /a ")
    exchange.receive(response(200))
    assert not exchange.finished
    exchange.receive(response(503))  # nothing of the second request was sent yet
    assert exchange.finished
    assert exchange.statuses == ["200", "503"]


def test_the_last_byte_is_kept_until_the_pause_ends() -> None:
    exchange = HttpExchange([HttpRequest("/a", b"body")], keeps_end=True)
    assert sent(exchange).endswith(b"\r\n\r\nbod")
    exchange.go_on()
    assert sent(exchange) == b"y"


def test_nothing_is_read_until_the_pause_ends() -> None:
    exchange = HttpExchange([HttpRequest("/a", b"body")], reads=False)
    assert not exchange.reads
    exchange.go_on()
    assert exchange.reads


@pytest.mark.parametrize(
    ("received", "status"),
    [(b"", "reset"), (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "200 cut short")],
)
def test_a_connection_that_ends_early_has_a_status(received: bytes, status: str) -> None:
    exchange = HttpExchange([HttpRequest("/a", b"body")])
    if received:
        exchange.receive(received)
    exchange.closed("reset")
    assert (exchange.statuses, exchange.finished) == ([status], True)


Frame = tuple[int, int, int, bytes]

SERVER_SETTINGS = frame(SETTINGS, 0, 0, struct.pack(">HIHI", 0x4, 1 << 20, 0x5, 1 << 20))


def frames(data: bytes) -> list[Frame]:
    found: list[Frame] = []
    while data:
        length = int.from_bytes(data[:3])
        kind, flags, stream = struct.unpack_from(">BBI", data, 3)
        found.append((kind, flags, stream, data[9 : 9 + length]))
        data = data[9 + length :]
    return found


def data_of(exchange: GrpcExchange) -> list[Frame]:
    """Take what may be sent, after the greeting: the frames of messages."""
    return [each for each in frames(sent(exchange).removeprefix(CLIENT_PREFACE)) if each[0] == DATA]


def trailers(status: int, message: str = "") -> bytes:
    fields = [(":status", "200"), ("grpc-status", str(status)), ("grpc-message", message)]
    return hpack.Encoder().encode(fields)


def test_a_call_is_sent_as_one_message_and_ended_by_trailers() -> None:
    exchange = GrpcExchange([GrpcCall("/s/m", [b"abc"], "gzip", {"x-a": "1"})])
    greeting = frames(sent(exchange).removeprefix(CLIENT_PREFACE))
    (head,) = (each for each in greeting if each[0] == HEADERS)
    fields = {str(name): str(value) for name, value in (each[:2] for each in hpack.Decoder().decode(head[3]))}
    assert fields[":path"] == "/s/m"
    assert fields["grpc-encoding"] == "gzip"
    assert fields["x-a"] == "1"
    assert b"".join(each[3] for each in greeting if each[0] == DATA) == b"\1\0\0\0\3abc"
    assert [each[1] for each in greeting if each[0] == DATA][-1] == END_STREAM
    exchange.receive(frame(DATA, 0, 1, b"response") + frame(HEADERS, END_HEADERS | END_STREAM, 1, trailers(3, "%61")))
    assert exchange.finished
    assert (exchange.statuses, exchange.texts) == (["INVALID_ARGUMENT"], ["a"])


def test_a_message_obeys_the_windows_and_the_largest_frame() -> None:
    exchange = GrpcExchange([GrpcCall("/s/m", [bytes(200_000)])])
    first = data_of(exchange)
    assert sum(len(each[3]) for each in first) == 65535
    assert max(len(each[3]) for each in first) == 16384
    exchange.receive(SERVER_SETTINGS)
    assert data_of(exchange) == []  # the connection's window is still closed
    exchange.receive(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 20)))
    (rest,) = data_of(exchange)
    assert len(rest[3]) == 200_005 - 65535
    assert rest[1] == END_STREAM


def test_calls_share_the_connection_and_each_has_a_status() -> None:
    exchange = GrpcExchange([GrpcCall("/s/m", [b"1"]), GrpcCall("/s/m", [b"2", b"3"])])
    assert {each[2] for each in data_of(exchange)} == {1, 3}
    exchange.receive(frame(HEADERS, END_HEADERS | END_STREAM, 3, trailers(0)))
    assert not exchange.finished
    exchange.receive(frame(RST_STREAM, 0, 1, struct.pack(">I", 8)))
    assert exchange.finished
    assert exchange.statuses == ["OK", "RST_STREAM 8"]


def test_the_end_of_a_message_is_kept_until_the_pause_ends() -> None:
    exchange = GrpcExchange([GrpcCall("/s/m", [bytes(20_000)])], keeps_end=True)
    begun = data_of(exchange)
    assert all(not each[1] for each in begun)
    exchange.go_on()
    ended = data_of(exchange)
    assert sum(len(each[3]) for each in begun + ended) == 20_005
    assert ended[-1][1] == END_STREAM


@pytest.mark.parametrize("reads", [True, False])
def test_the_server_may_send_only_to_a_client_that_reads(reads: bool) -> None:
    exchange = GrpcExchange([GrpcCall("/s/m", [b"1"])], reads=reads)
    settings = frames(sent(exchange).removeprefix(CLIENT_PREFACE))[0]
    windows = dict(struct.iter_unpack(">HI", settings[3]))
    assert (windows[4] > 0) is reads
    exchange.go_on()
    later = [each for each in frames(sent(exchange)) if each[0] == SETTINGS]
    assert len(later) == (0 if reads else 1)


def test_settings_and_pings_are_acknowledged() -> None:
    exchange = GrpcExchange([GrpcCall("/s/m", [])])
    sent(exchange)
    exchange.receive(SERVER_SETTINGS + frame(PING, 0, 0, bytes(8)))
    assert [each[:2] for each in frames(sent(exchange))] == [(SETTINGS, ACK), (PING, ACK)]


def test_a_connection_that_ends_gives_every_open_call_its_status() -> None:
    exchange = GrpcExchange([GrpcCall("/s/m", [b"1"])] * 2)
    exchange.receive(frame(GOAWAY, 0, 0, struct.pack(">II", 0, 11) + b"too much"))
    assert exchange.statuses == ["GOAWAY 11"] * 2
    assert exchange.texts == ["too much"] * 2
    other = GrpcExchange([GrpcCall("/s/m", [b"1"])])
    other.closed("reset")
    assert (other.statuses, other.finished) == (["reset"], True)
