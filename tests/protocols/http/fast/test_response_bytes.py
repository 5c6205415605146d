"""Large responses leave in pieces, in order with others, and their memory is released once."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from protocols.http.fast.response_bytes import (
    ResponseBytes,
    ResponseWriter,
    header_lines,
    response_bytes,
    response_head,
)
from protocols.http.responses import SERVER_HEADER, HttpResponse, http_error
from protocols.loop_budgets import ITERATION_BYTE_SIZE, IterationBudget
from tests.protocols.http.fast.conftest import RecordingTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


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


LARGE = bytes(range(256)) * (5 * ITERATION_BYTE_SIZE // 512)


class WriterLab:
    """A writer of a connection, and what it has called."""

    def __init__(self, budget: IterationBudget | None = None) -> None:
        self.transport = RecordingTransport()
        self.called: list[str] = []
        self.writer = ResponseWriter(
            self.transport, budget or IterationBudget(), lambda: self.called.append("all written")
        )

    def write(self, name: str, *parts: bytes) -> None:
        self.writer.write(parts, sum(map(len, parts)), [lambda: self.called.append(name)])


def run(test: Callable[[WriterLab], Awaitable[None]]) -> None:
    async def main() -> None:
        await test(WriterLab())

    asyncio.run(main())


def test_a_small_response_is_written_at_once() -> None:
    async def test(lab: WriterLab) -> None:
        lab.write("small", b"head", b"body")
        assert (lab.transport.writes, lab.called, lab.writer.busy) == ([b"headbody"], ["small"], False)

    run(test)


def test_a_large_response_leaves_in_a_piece_per_event_loop_iteration() -> None:
    async def test(lab: WriterLab) -> None:
        lab.write("large", b"head", LARGE)
        written = []
        while lab.writer.busy:
            written.append(len(lab.transport.written))
            assert lab.called == []
            await asyncio.sleep(0)
        assert lab.transport.written == b"head" + LARGE
        assert lab.called == ["large", "all written"]
        assert max(map(len, lab.transport.writes)) <= ITERATION_BYTE_SIZE
        assert written == sorted(set(written)), "each iteration writes"

    run(test)


def test_what_follows_a_large_response_waits_for_it() -> None:
    async def test(lab: WriterLab) -> None:
        lab.write("large", LARGE)
        lab.write("next", b"", b"next")
        for _ in range(10):
            await asyncio.sleep(0)
        assert lab.transport.written == LARGE + b"next"
        assert lab.called == ["large", "next", "all written"]

    run(test)


def test_the_transport_gets_no_more_while_it_has_something_left() -> None:
    async def test(lab: WriterLab) -> None:
        lab.transport.unsent = 10
        lab.write("large", LARGE)
        await asyncio.sleep(0)
        assert lab.transport.writes == []
        assert lab.writer.unsent_byte_size == len(LARGE) + 10
        lab.transport.unsent = 0
        lab.writer.resume()
        assert len(lab.transport.writes) == 1
        lab.transport.unsent = 5
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(lab.transport.writes) == 1
        assert lab.writer.unsent_byte_size == len(LARGE) - len(lab.transport.written) + 5

    run(test)


def test_connections_share_what_an_iteration_may_write() -> None:
    async def test(lab: WriterLab) -> None:
        budget = IterationBudget()
        labs = [WriterLab(budget) for _ in range(20)]
        for each in labs:
            each.write("large", LARGE)
        sizes = [len(each.transport.written) for each in labs]
        assert sum(sizes) < 1.5 * ITERATION_BYTE_SIZE
        assert min(sizes) > 0
        await asyncio.sleep(0)
        assert all(len(each.transport.written) > size for each, size in zip(labs, sizes, strict=True))

    run(test)


def test_memory_is_released_when_the_connection_is_lost() -> None:
    async def test(lab: WriterLab) -> None:
        lab.transport.unsent = 10
        lab.write("small", b"small")
        lab.write("large", LARGE)
        lab.write("next", b"next")
        lab.transport.aborted = True
        lab.writer.close()
        assert lab.called == ["small", "large", "next"]
        lab.writer.close()
        lab.writer.resume()
        await asyncio.sleep(0)
        assert lab.called == ["small", "large", "next"]
        assert lab.transport.writes == [b"small"]

    run(test)
