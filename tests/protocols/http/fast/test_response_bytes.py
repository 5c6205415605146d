from __future__ import annotations

import re

from protocols.http.fast.response_bytes import ResponseBytes, header_lines, response_bytes, response_head
from protocols.http.inference.response import HttpResponse, http_error
from protocols.http.responses import SERVER_HEADER


def test_a_head_has_the_headers_of_aiohttp_in_their_order() -> None:
    response = HttpResponse(200, "application/json", [b"12345", bytes(7)], {"Content-Encoding": "gzip"})
    head = response_head(response, 12, header_lines({"Vary": "Origin", "X": "y"})).decode()
    lines = head.split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert lines[1:7] == [
        f"Server: {SERVER_HEADER['Server']}",
        "Content-Encoding: gzip",
        "Content-Type: application/json",
        "Vary: Origin",
        "X: y",
        "Content-Length: 12",
    ]
    assert re.fullmatch(r"Date: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", lines[7])
    assert lines[8:] == ["", ""]


def error(status: int, text: str, *, plain: bool) -> ResponseBytes:
    return response_bytes(http_error(status, text, plain=plain), b"")


def test_an_error_is_json_whatever_its_content_type() -> None:
    plain, other = error(404, "no \udcff", plain=True).head, error(400, "no", plain=False).head
    assert plain.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert b"\r\nContent-Type: text/plain\r\n" in plain
    assert plain.endswith(b"Length: 16\r\nDate: " + plain.partition(b"Date: ")[2])
    assert plain.endswith(b'\r\n\r\n{"error":"no ?"}')
    assert b"\r\nContent-Type: application/json\r\n" in other


def test_the_last_response_of_a_connection_says_so() -> None:
    response = error(400, "a\r\n\r\nb", plain=True).last()
    head, _, body = response.head.partition(b"\r\n\r\n")
    assert head.endswith(b"\r\nConnection: close")
    assert body == b'{"error":"a\\r\\n\\r\\nb"}'
    assert response.status == 400


def test_the_byte_size_of_a_response_is_that_of_its_head_and_what_follows() -> None:
    assert ResponseBytes(b"head", [b"abc", memoryview(bytes(5))]).byte_size == 12
