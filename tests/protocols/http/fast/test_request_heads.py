from __future__ import annotations

import pytest

from protocols.http.fast.request_heads import InferFields, can_become_head, parse_head
from protocols.http.inference.compression import GZIP, IDENTITY

LIMIT = 1000
TARGET = "/v2/models/m/infer"


def head(*lines: str, start: str = "POST /v2/models/m/infer HTTP/1.1", host: str = "Host: x") -> bytes:
    return "".join(f"{line}\r\n" for line in (start, host, *lines, "")).encode()


def parsed(text: bytes) -> tuple[str, int, InferFields | None]:
    """Return target, content length, and what is said of an inference request, of a head that is beyond doubt."""
    found = parse_head(text, LIMIT)
    assert found is not None
    return found.target, found.content_length, found.infer


def test_a_request_of_inference_says_what_the_fast_path_needs() -> None:
    target = "/v2/models/m.a-b_c/versions/3/infer?x=y"
    text = head(
        "Content-Length: 5000",
        "Inference-Header-Content-Length: 70",
        "Accept-Encoding: gzip",
        "Connection: keep-alive",
        start=f"POST {target} HTTP/1.1",
    )
    assert parsed(text) == (target, 5000, InferFields("m.a-b_c", "3", 70, GZIP))
    assert parsed(head("content-length: 7")) == (TARGET, 7, InferFields("m", "", 7, IDENTITY))


def test_headers_are_kept_as_they_were_sent_and_found_in_any_case() -> None:
    found = parse_head(head("Content-Length: 7", "x-Key:  a b \t"), LIMIT)
    assert found is not None
    assert found.headers == ((b"Host", b"x"), (b"Content-Length", b"7"), (b"x-Key", b"a b \t"))
    assert found.header("X-KEY") == b"a b"
    assert found.header("X") is None


def test_a_raw_request_has_no_header() -> None:
    text = head("Content-Length: 12", "Inference-Header-Content-Length: 0")
    assert parsed(text) == (TARGET, 12, InferFields("m", "", 0, IDENTITY))


@pytest.mark.parametrize(
    ("text", "content_length"),
    [
        (head(start="GET /v2 HTTP/1.1"), 0),
        (head(start="GET /v2/models/m/infer HTTP/1.1"), 0),
        (head("Content-Length: 2", start="POST /v2/models/m/generate HTTP/1.1"), 2),
        (head("Content-Length: 2", start="POST /nowhere HTTP/1.1"), 2),
        (head(), 0),
        (head("Content-Length: 2", "Content-Encoding: gzip"), 2),
        (head("Content-Length: 1001"), 1001),
        (head("Content-Length: 1001", "Inference-Header-Content-Length: 0"), 1001),
        (head("Content-Length: 5000", "Inference-Header-Content-Length: 1001"), 5000),
        (head("Content-Length: 5", "Inference-Header-Content-Length: 6"), 5),
        (head("Content-Length: 5", "Inference-Header-Content-Length: -1"), 5),
        (head("Content-Length: 5", "Inference-Header-Content-Length: 5x"), 5),
        (head("Content-Length: 2147483648", "Inference-Header-Content-Length: 1"), 2147483648),
    ],
)
def test_what_is_not_inference_or_has_sizes_to_be_refused_is_for_aiohttp(text: bytes, content_length: int) -> None:
    assert parsed(text)[1:] == (content_length, None)


@pytest.mark.parametrize(
    "text",
    [
        head("Transfer-Encoding: chunked"),
        head("Content-Length: 5", "Transfer-Encoding: chunked"),
        head("Content-Length: 5", "Transfer-Encoding : chunked"),
        head("Content-Length: 5", "Content-Length: 5"),
        head("Content-Length: 5", "content-length: 6"),
        head("Content-Length: 5, 5"),
        head("Content-Length: +5"),
        head("Content-Length: -5"),
        head("Content-Length: 0x5"),
        head("Content-Length: 5_0"),
        head("Content-Length:"),
        head("Content-Length: \u0665"),
        head("Content-Length: 9223372036854775808"),
        head("Content-Length : 5"),
        head("Content-Length: 5", "X: a", " folded"),
        head("Content-Length: 5", "X: a\tb", "\tfolded"),
        head("Content-Length: 5", "X: a\0b"),
        head("Content-Length: 5", "X: a\rb"),
        head("Content-Length: 5\nX: y"),
        head("Content-Length: 5", "Expect: 100-continue"),
        head("Content-Length: 5", "Connection: close, keep-alive"),
        head("Content-Length: 5", "Connection: close", start="POST /v2/logging HTTP/1.1"),
        head("Content-Length: 5", "Connection: upgrade", "Upgrade: h2c"),
        head("Content-Length: 5", "X: 1", "X: 2"),
        head("Content-Length: 5", "no colon"),
        head("Content-Length: 5", host="X-Host: x"),
        head("Content-Length: 5", "Host: y"),
        head("Content-Length: 5", start="POST /v2/models/m/infer HTTP/1.0"),
        head("Content-Length: 5", start="POST /v2/models/m/infer HTTP/2.0"),
        head("Content-Length: 5", start="POST http://x/v2/models/m/infer HTTP/1.1"),
        head("Content-Length: 5", start="POST  /v2/models/m/infer HTTP/1.1"),
        head("Content-Length: 5", start="POST /v2/models/\u00e9/infer HTTP/1.1"),
        head("Content-Length: 5", start="CONNECT x:80 HTTP/1.1"),
        head("Content-Length: 5", start="post /v2/models/m/infer HTTP/1.1"),
        head("Content-Length: 5", *(f"X{number}: y" for number in range(128))),
        head("Content-Length: 5", "X: " + "y" * 8192),
        b"\r\n\r\n",
        b"\r\n" + head("Content-Length: 5"),
    ],
)
def test_a_head_that_leaves_any_doubt_is_not_plain(text: bytes) -> None:
    assert parse_head(text, LIMIT) is None


@pytest.mark.parametrize(("value", "closes"), [("close", True), ("Close", True), ("keep-alive", False), ("", False)])
def test_an_inference_request_may_be_the_last_one_of_its_connection(value: str, closes: bool) -> None:
    plain = parse_head(head("Content-Length: 5", f"Connection: {value}"), LIMIT)
    assert plain is not None
    assert plain.infer is not None
    assert plain.closes is closes


def test_every_part_of_a_plain_head_can_become_one() -> None:
    text = head("Content-Length: 5", start="POST /v2/models/m/infer?x=%20y HTTP/1.1")
    # Only what follows a carriage return shows whether it is a bare one.
    assert [end for end in range(1, len(text)) if not can_become_head(text[:end])] == []


@pytest.mark.parametrize(
    "begun",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET /v2 HTTP/1.1\nHost: x\n\n",
        b"GET /v2 HTTP/2",
        b"GET  /v2",
        b"get /v2",
        b"GET http://x/v2",
        b"PRI * HTTP/2.0",
        b"\r\n",
        b"GET /" + b"x" * 8192,
    ],
)
def test_what_can_never_become_a_plain_head_is_known_at_once(begun: bytes) -> None:
    assert not can_become_head(begun)
