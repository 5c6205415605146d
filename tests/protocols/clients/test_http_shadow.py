"""The bytes of a connection that is passed on are read on their way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.tools.shadow_of import Comparison, Exchange, Message, ProxySettings
from protocols.clients.http_shadow import Copies, Tap, run_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

REQUEST = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n" + b'{"outputs":[]}'
OTHER = b"GET /v2 HTTP/1.1\r\nHost: a\r\n\r\n"


class KeptCopies(Copies):
    """Keeps the exchanges."""

    def __init__(self, **settings: float) -> None:
        super().__init__("http://127.0.0.1:1", ProxySettings(**settings), Comparison({}))  # type: ignore[arg-type]
        self.found: list[Exchange] = []

    def add(self, exchange: Exchange) -> None:
        self.found.append(exchange)


@pytest.fixture
def copies() -> KeptCopies:
    return KeptCopies()


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        yield data[begin : begin + size]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_exchanges_are_found_whatever_the_pieces_are(copies: KeptCopies, size: int) -> None:
    tap = Tap(copies)
    continued = b"HTTP/1.1 100 Continue\r\n\r\n"
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    for data in pieces(REQUEST + OTHER + REQUEST, size):
        tap.of_client(data)
    for data in pieces(continued + RESPONSE + RESPONSE + chunked, size):
        tap.of_server(data)
    first, second = copies.found
    assert (first.path, first.request.body, first.status, first.response.body) == (
        "/v2/models/m/infer", b"{}", 200, b'{"outputs":[]}',
    )  # fmt: skip
    assert second.response == Message({"transfer-encoding": "chunked"}, b"abc")
    assert copies.compared.report.sampled == 2


@pytest.mark.parametrize(
    "data",
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01", b"HEAD /v2 HTTP/1.1\r\n\r\n", OTHER * 100],
    ids=["gRPC", "TLS", "HEAD", "pipelining"],
)
def test_a_connection_that_is_not_understood_is_not_read_any_more(copies: KeptCopies, data: bytes) -> None:
    tap = Tap(copies)
    tap.of_client(data)
    tap.of_client(REQUEST)
    tap.of_server(RESPONSE)
    assert not copies.found
    assert copies.compared.unread_connections == 1


def test_large_bodies_are_passed_on_and_not_kept(copies: KeptCopies) -> None:
    tap = Tap(copies)
    size = 17 << 20
    tap.of_client(b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
    for _ in range(17):
        tap.of_client(bytes(1 << 20))
    tap.of_server(RESPONSE)
    assert not copies.found
    assert copies.compared.report.dropped == {"bodies that are too large": 1}


def test_what_all_connections_keep_is_bounded_and_given_back(copies: KeptCopies) -> None:
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (16 << 20)
    taps = [Tap(copies) for _ in range(6)]
    for tap in taps:
        tap.of_client(head)
        tap.of_client(bytes(16 << 20))
    assert copies.compared.report.dropped == {"too many wait": 2}, "64 MiB in all"
    for tap in taps:
        tap.close()
    assert copies.compared.report.dropped == {"too many wait": 2, "incomplete responses": 4}
    assert copies.keep(64 << 20), "all is given back"


def test_a_request_that_is_never_complete_is_counted(copies: KeptCopies) -> None:
    tap = Tap(copies)
    tap.of_client(REQUEST[:-1])
    tap.close()
    assert copies.compared.report.sampled == 1
    assert copies.compared.report.dropped == {"incomplete requests": 1}


def test_bodies_of_requests_that_are_not_copied_are_not_kept(copies: KeptCopies) -> None:
    tap = Tap(copies)
    tap.of_client(b"POST /v2/repository/models/m/load HTTP/1.1\r\nContent-Length: 1048576\r\n\r\n" + bytes(1 << 19))
    assert copies.keep(64 << 20)


def test_a_response_before_the_end_of_its_request_ends_the_reading(copies: KeptCopies) -> None:
    tap = Tap(copies)
    tap.of_client(REQUEST[:-1])
    tap.of_server(RESPONSE)
    tap.of_client(REQUEST[-1:] + REQUEST)
    tap.of_server(RESPONSE)
    assert not copies.found
    assert copies.compared.unread_connections == 1


def test_a_part_of_the_requests_is_chosen() -> None:
    copies = KeptCopies(percent=10)
    for _ in range(1000):
        copies.wants("POST", "/v2/models/m/infer")
    assert 40 < copies.compared.report.sampled < 180


def test_what_waits_is_bounded() -> None:
    async def test() -> None:
        compared = Comparison({})
        async with Copies("http://127.0.0.1:1", ProxySettings(concurrency=1, waiting=3), compared) as copies:
            for _ in range(10):
                copies.wants("POST", "/v2/models/m/infer")
                copies.add(Exchange("/v2/models/m/infer", Message({}, b"{}"), 200, Message({}, b"{}")))
        report = compared.report
        assert report.sampled == report.dropped.total() == 10
        assert report.dropped["too many wait"] == 6

    asyncio.run(test())


def test_bytes_are_passed_on_unchanged_and_a_lost_server_ends_the_connection() -> None:
    content = bytes(range(256)) * 1000

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def test() -> None:
        old = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = old.sockets[0].getsockname()[1]
        stop = asyncio.Event()
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        proxy = asyncio.create_task(
            run_proxy(
                ("127.0.0.1", 0),
                ("127.0.0.1", port),
                "http://127.0.0.1:1",
                ProxySettings(),
                Comparison({}),
                found.set_result,
                stop,
            )
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", await found)

        async def send() -> None:
            writer.write(content)
            await writer.drain()
            writer.write_eof()

        sending = asyncio.create_task(send())
        assert await reader.read(-1) == content
        await sending
        writer.close()
        old.close()
        await old.wait_closed()
        lost, its = await asyncio.open_connection("127.0.0.1", await found)
        assert await lost.read() == b""
        its.close()
        stop.set()
        await proxy

    asyncio.run(asyncio.wait_for(test(), 30))
