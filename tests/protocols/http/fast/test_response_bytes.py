from __future__ import annotations

import re

from protocols.http.fast.response_bytes import error_bytes, response_head
from protocols.http.responses import SERVER_HEADER


def test_a_head_has_the_headers_of_aiohttp_in_their_order() -> None:
    head = response_head(200, "application/json", 12, b"Content-Encoding: gzip\r\n").decode()
    lines = head.split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert lines[1:5] == [
        f"Server: {SERVER_HEADER['Server']}",
        "Content-Encoding: gzip",
        "Content-Type: application/json",
        "Content-Length: 12",
    ]
    assert re.fullmatch(r"Date: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", lines[5])
    assert lines[6:] == ["", ""]


def test_an_error_is_json_whatever_its_content_type() -> None:
    plain, other = error_bytes(404, "no \udcff", plain=True).head, error_bytes(400, "no", plain=False).head
    assert plain.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert b"\r\nContent-Type: text/plain\r\n" in plain
    assert plain.endswith(b"Length: 16\r\nDate: " + plain.partition(b"Date: ")[2])
    assert plain.endswith(b'\r\n\r\n{"error":"no ?"}')
    assert b"\r\nContent-Type: application/json\r\n" in other


def test_the_last_answer_of_a_connection_says_so() -> None:
    reply = error_bytes(400, "a\r\n\r\nb", plain=True).last().head
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.endswith(b"\r\nConnection: close")
    assert body == b'{"error":"a\\r\\n\\r\\nb"}'
