"""The state of an attacker's connection over HTTP, without sockets."""

from __future__ import annotations

import pytest

from bench.heavy.attack import HttpRequest
from bench.heavy.exchange import Exchange, HttpExchange, chunked


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
