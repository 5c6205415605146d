"""A listening HTTP server of aiohttp's low level: its limits, its errors, and an orderly stop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, cast

from kernel.errors import NoDescriptorLeft
from protocols.http.aiohttp_internals import AiohttpConnection, AiohttpServer
from protocols.http.responses import error_body
from protocols.listening import listen, listening_address

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable

    from aiohttp.abc import AbstractAccessLogger

    from protocols.http import web
    from protocols.http.fast.fast_path import FastPath

#: How often connections are checked while the server waits for them to become idle.
_DRAIN_INTERVAL_S = 0.02

#: How long connections that did not become idle in time may take to close.
_CLOSE_S = 1.0


_REFUSAL_BODY = error_body(NoDescriptorLeft().text)

#: The response on a connection that is refused, before a request was read.
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_REFUSAL_BODY), _REFUSAL_BODY)
)


class Refusal(asyncio.Protocol):
    """Sends the response on a connection that is refused, and drops what it receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(_REFUSAL)


class HttpListener:
    """Serves one bound socket with one handler of all requests."""

    def __init__(
        self,
        sock: socket.socket,
        service: str,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        tls: ssl.SSLContext | None = None,
        access_logger: type[AbstractAccessLogger] | None = None,
    ) -> None:
        """`service` is what the title calls it. The listener owns `sock` from `start` on.

        With `tls` connections are encrypted, also on the fast path.
        """
        self._sock = sock
        self._handler = handler
        #: Gets every connection before aiohttp does; None if aiohttp gets all of them. Set before `start`.
        self.first: FastPath | None = None
        self._tls = tls
        self._access_logger = access_logger
        #: Gives new connections to front doors in processes of their own, or to `first`; None without such. As `first`.
        self.arrival: Callable[[], asyncio.BaseProtocol] | None = None
        self._draining = False
        self.title = f"{service} at {listening_address(sock)}"
        self.aiohttp_server: AiohttpServer | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self.aiohttp_server = AiohttpServer(self._handle, handler_cancellation=True)
        self.aiohttp_server.access_logger = self._access_logger
        connect = self.aiohttp_server if self.first is None else self.first.open(self.aiohttp_server)
        self._server = await listen(self._sock, self.arrival or connect, self._tls, make_refusal=Refusal)

    @property
    def connection_count(self) -> int:
        """How many connections clients have."""
        if self.aiohttp_server is None:
            return 0
        # One that shares a transport with the fast path is counted there.
        connections = self.aiohttp_server.connections
        own = sum(1 for each in connections if isinstance(each, AiohttpConnection) and not each.on_response)
        return own if self.first is None else own + self.first.connection_count

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, close idle ones, give requests that run `grace_s` seconds, and close.

        aiohttp's own shutdown drops the body of a request whose head has come. So connections are closed one by
        one, as soon as they are idle.
        """
        if self._server is None or self.aiohttp_server is None:
            return
        server, self._server = self._server, None
        server.close()
        self._draining = True
        async with asyncio.TaskGroup() as tasks:
            if self.first is not None:
                tasks.create_task(self.first.close(grace_s))
            tasks.create_task(self._drain(self.aiohttp_server, grace_s))
        await self.aiohttp_server.shutdown(_CLOSE_S)

    async def _drain(self, server: AiohttpServer, grace_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._close_idle(server):  # noqa: ASYNC110  # aiohttp has no event for it
                    await asyncio.sleep(_DRAIN_INTERVAL_S)

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        response = await self._handler(http)
        if self._draining:
            response.force_close()
        return response

    def _close_idle(self, server: AiohttpServer) -> bool:
        """Close connections without a request; whether there are others."""
        connections = [each for each in server.connections if isinstance(each, AiohttpConnection)]
        for connection in connections:
            if connection.idle:
                connection.close()
        return any(not connection.idle for connection in connections)
