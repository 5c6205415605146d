"""Responses of HTTP/1.1 as a load process counts them."""

from __future__ import annotations

import pytest

from protocols.clients.http_load import (
    DONE,
    FAILED,
    INCOMPLETE,
    HttpLoadState,
    UnreadableResponse,
    connect,
    read_head,
    sequence_id_bytes,
)

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def state(*, streaming: bool = False) -> HttpLoadState:
    found = connect(b"", streaming=streaming, has_final=False)
    assert found.begin(b"request") == b"request"
    return found


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_responses_are_complete_whatever_pieces_they_come_in(size: int) -> None:
    connection = state()
    for _ in range(3):
        connection.begin(b"request")
        pieces = [RESPONSE[start : start + size] for start in range(0, len(RESPONSE), size)]
        outcomes = [connection.feed(piece) for piece in pieces]
        assert outcomes == [INCOMPLETE] * (len(pieces) - 1) + [DONE]
        assert (connection.responses, connection.usable) == (1, True)


def test_the_rest_of_a_large_body_can_be_skipped() -> None:
    connection = state()
    assert connection.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\nabc") == INCOMPLETE
    assert connection.left == 999_997
    assert connection.skip(999_996) == INCOMPLETE
    assert connection.skip(1) == DONE


def test_an_error_has_its_status_and_its_text() -> None:
    connection = state()
    body = b'{"error":"model is busy"}'
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert connection.feed(head + body[:5]) == INCOMPLETE
    assert connection.feed(body[5:]) == FAILED
    assert (connection.error, connection.usable) == ("503: model is busy", True)
    connection.begin(b"request")
    assert connection.feed(RESPONSE) == DONE


def test_an_error_in_chunks_has_its_text() -> None:
    connection = state()
    head = CHUNKED.replace(b"200 OK", b"400 Bad Request")
    assert connection.feed(head + chunk(b'{"error":') + chunk(b'"no"}') + chunk(b"")) == FAILED
    assert connection.error == "400: no"


def test_a_response_without_a_body_is_complete_with_its_head() -> None:
    assert state().feed(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") == DONE


def test_a_connection_that_is_closed_after_its_response_is_not_used_again() -> None:
    connection = state()
    assert connection.feed(RESPONSE.replace(b"Content-Type: x", b"Connection: close")) == DONE
    assert not connection.usable


def test_a_connection_that_ends_early_is_a_failure() -> None:
    connection = state()
    connection.feed(RESPONSE[:-1])
    assert connection.closed() == FAILED
    assert "closed the connection" in connection.error


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_each_event_of_a_stream_is_a_response(size: int) -> None:
    events = [b'data: {"OUT":1}\n\n', b'data: {"OUT":2}\n\ndata: {"OUT":3}\n', b"\n", b""]
    data = CHUNKED + b"".join(map(chunk, events))
    connection = state(streaming=True)
    outcomes = [connection.feed(data[start : start + size]) for start in range(0, len(data), size)]
    assert (outcomes[-1], set(outcomes[:-1]) <= {INCOMPLETE}) == (DONE, True)
    assert connection.responses == 3


def test_an_event_with_an_error_fails_the_request() -> None:
    connection = state(streaming=True)
    data = CHUNKED + chunk(b'data: {"OUT":1}\n\n') + chunk(b'data: {"error":"model broke"}\n\n') + chunk(b"")
    assert connection.feed(data) == FAILED
    assert connection.error == "model broke"


def test_continue_is_no_response() -> None:
    connection = state()
    assert connection.feed(b"HTTP/1.1 100 Continue\r\n\r\n") == INCOMPLETE
    assert connection.feed(RESPONSE) == DONE


@pytest.mark.parametrize("data", [b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", b"a" * 70000])
def test_what_is_no_http_fails_the_request_and_ends_the_connection(data: bytes) -> None:
    connection = state()
    assert connection.feed(data) == FAILED
    assert not connection.usable


def test_a_length_that_is_too_short_ends_the_connection() -> None:
    connection = state()
    assert connection.feed(RESPONSE + b"more") == FAILED
    assert not connection.usable


def test_heads_of_http_1_0_close_the_connection_by_default() -> None:
    assert not read_head(b"HTTP/1.0 200 OK\r\nContent-Length: 1").keeps_alive
    assert read_head(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive").keeps_alive
    with pytest.raises(UnreadableResponse):
        read_head(b"HTTP/2 OK")


def test_the_id_of_a_sequence_is_a_number_in_json() -> None:
    assert sequence_id_bytes(1 << 48) == b"281474976710656"


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    connection = state()
    assert connection.feed(b"HTTP/1.0 200 OK\r\n\r\nhel") == INCOMPLETE
    assert connection.feed(b"lo") == INCOMPLETE
    assert connection.closed() == DONE
    assert not connection.usable


def test_chunks_that_end_early_are_a_failure() -> None:
    connection = state()
    assert connection.feed(CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"5\r\nhel") == INCOMPLETE
    assert connection.closed() == FAILED


def test_more_bytes_than_the_length_says_are_a_failure() -> None:
    connection = state()
    assert connection.feed(RESPONSE[:-1]) == INCOMPLETE
    assert connection.feed(b"oo") == FAILED
    assert (connection.error, connection.usable) == ("more bytes than the response has", False)


def test_a_negative_length_of_a_chunk_is_a_failure() -> None:
    assert state().feed(CHUNKED + b"-9\r\n") == FAILED
