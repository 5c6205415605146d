"""aiohttp on the transport of the fast path: made when it is needed, and never in the way of the transport."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from protocols.http.aiohttp_internals import AiohttpServer, SharedAiohttp
from protocols.http.responses import empty_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from aiohttp import web

GET = b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"


class Transport(asyncio.Transport):
    """Remembers what is written, and whether it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


class Lab:
    def __init__(self) -> None:
        self.transport = Transport()
        self.responded: asyncio.Queue[bool] = asyncio.Queue()
        self.bodies: list[bytes] = []
        self.server = AiohttpServer(self._handle)
        self.shared = SharedAiohttp(self.transport, self.responded.put_nowait)

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        self.bodies.append(await http.read())
        return empty_response()


def run(test: Callable[[Lab], Awaitable[None]]) -> None:
    async def main() -> None:
        lab = Lab()
        await test(lab)
        lab.shared.connection_lost(None)
        await lab.server.shutdown(1.0)

    asyncio.run(main())


def test_without_a_message_there_is_no_connection() -> None:
    async def test(lab: Lab) -> None:
        lab.shared.pause_writing()
        lab.shared.resume_writing()
        lab.shared.leave_transport()
        assert list(lab.server.connections) == []
        assert not lab.shared.busy

    run(test)


def test_a_connection_may_be_told_again_that_it_can_write_or_that_it_cannot() -> None:
    async def test(lab: Lab) -> None:
        lab.shared.begin(lab.server, GET)
        assert await lab.responded.get()
        [connection] = lab.server.connections
        for _ in range(2):
            lab.shared.resume_writing()
            assert not connection.writing_paused
        for _ in range(2):
            lab.shared.pause_writing()
            assert connection.writing_paused

    run(test)


def test_messages_are_served_one_after_the_other_by_one_connection() -> None:
    async def test(lab: Lab) -> None:
        for count in (1, 2):
            lab.shared.begin(lab.server, GET)
            assert lab.shared.busy
            assert await lab.responded.get()
            assert not lab.shared.busy
            assert lab.transport.written.count(b"HTTP/1.1 200 OK\r\n") == count
        assert len(list(lab.server.connections)) == 1

    run(test)


def test_a_body_may_come_in_parts_while_writing_is_paused() -> None:
    async def test(lab: Lab) -> None:
        lab.shared.begin(lab.server, POST)
        lab.shared.pause_writing()
        lab.shared.feed(b"ab")
        lab.shared.feed(b"cd")
        lab.shared.resume_writing()
        assert await lab.responded.get()
        assert lab.bodies == [b"abcd"]

    run(test)


def test_leaving_the_transport_keeps_it_open() -> None:
    async def test(lab: Lab) -> None:
        lab.shared.begin(lab.server, GET)
        assert await lab.responded.get()
        lab.shared.leave_transport()
        assert not lab.transport.closed

    run(test)
