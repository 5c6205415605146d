"""A listening HTTP server of aiohttp's low level: its limits, its errors, and an orderly stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_parser import RawRequestMessage

from protocols.http.body import MAX_CHUNKS
from protocols.http.client_timeouts import ChunkOverhead, Patience
from protocols.http.responses import error_response

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

#: How long an idle connection is kept, and one whose first request does not come.
KEEPALIVE_S = 75.0

#: How long a body that nobody wants is read on before its connection is closed.
LINGERING_S = 10.0

#: How long a client may take for the handshake of TLS.
HANDSHAKE_S = 10.0

#: How often connections are looked at while the server waits for them to become idle.
_DRAIN_INTERVAL_S = 0.02

#: How long connections get to close that were not idle when their time was over.
_CLOSE_S = 1.0

#: How often connections are looked at, which is also how exact their times are.
_TICK_S = 1.0

#: Stands for no limit: a guest of the lane is closed by the lane.
_NEVER_S = 365 * 24 * 3600.0

#: Connections that the system keeps for us until we accept them.
BACKLOG = 1024


class AiohttpConnection(web.RequestHandler):
    """A connection that answers what is no HTTP with our errors, and logs it where nobody is alarmed."""

    __slots__ = ("answered", "chunks", "patience")

    #: Called after each response, with whether the connection stays open. None where nobody wants to know.
    answered: Callable[[bool], None] | None
    patience: Patience
    #: The body that comes, where it is chunked.
    chunks: tuple[ChunkOverhead, StreamReader] | None

    def data_received(self, data: bytes) -> None:
        known = self._messages[-1] if self._messages else None
        super().data_received(data)
        if not data:  # aiohttp calls itself
            return
        self.patience.received(self._loop.time(), idle=self.idle)
        last = self._messages[-1] if self._messages else None
        of_body = len(data)
        if last is not None and last is not known:
            message, content = last
            self.chunks = None
            if isinstance(message, RawRequestMessage) and message.chunked:
                self.chunks = ChunkOverhead(), content
                of_body -= _head_byte_size(message)
        if self.chunks is not None:
            self._check_chunks(*self.chunks, of_body)

    def _check_chunks(self, overhead: ChunkOverhead, content: StreamReader, byte_size: int) -> None:
        if content.is_eof():
            self.chunks = None
        if overhead.is_excessive(byte_size, content.total_bytes, MAX_CHUNKS):
            self.chunks = None
            content.set_exception(web.RequestPayloadError("chunk extensions are too long"))
            content.feed_eof()
            self.close()  # when the handler has answered; nothing is read any more

    def expire(self, now: float) -> None:
        """End the connection where the client has kept it waiting for too long."""
        transport = self.transport
        if transport is None or self.answered is not None:  # a guest is its owner's affair
            return
        if self.patience.is_over(now, idle=self.idle, unsent=transport.get_write_buffer_size()):
            transport.abort()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        sent, lost = await super().finish_response(request, resp, start_time)
        if self.answered is not None and not lost:
            self.answered(bool(sent.keep_alive))
        return sent, lost

    @property
    def idle(self) -> bool:
        """Whether no request is being received or answered."""
        return self._current_request is None and not self._messages

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response has been begun, an error cannot be sent any more")
        if status >= 500:
            logger.error("request from %s failed", request.remote, exc_info=exc)
        else:
            logger.debug("bad request from %s: %s", request.remote, message)
        reply = error_response(status, message or "internal error", plain=True)
        reply.force_close()
        return reply


class AiohttpServer(web.Server):
    """Makes the connections that aiohttp serves."""

    #: Is told of every answer that was sent. None where nobody wants to know.
    access_logger: type[AbstractAccessLogger] | None = None

    #: Goes while there are connections.
    _timer: asyncio.TimerHandle | None = None

    def __call__(self) -> AiohttpConnection:
        return self._connection(KEEPALIVE_S)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._tick)

    def expire(self, now: float) -> None:
        """Let all connections look at the time `now`."""
        for connection in list(self.connections):
            if isinstance(connection, AiohttpConnection):
                connection.expire(now)

    def _tick(self) -> None:
        self.expire(self._loop.time())
        self._timer = self._loop.call_later(_TICK_S, self._tick) if self.connections else None

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # aiohttp's name
        await super().shutdown(timeout)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def guest(self, answered: Callable[[bool], None]) -> AiohttpConnection:
        """Return a connection for single requests on the fast path's transport. See `AiohttpConnection.answered`."""
        connection = self._connection(_NEVER_S)
        connection.answered = answered
        return connection

    def _connection(self, keepalive_timeout: float) -> AiohttpConnection:
        connection = AiohttpConnection(
            self,
            loop=self._loop,
            keepalive_timeout=keepalive_timeout,
            lingering_time=LINGERING_S,
            logger=logger,
            # None turns it off, as web.run_app does.
            access_log=None if self.access_logger is None else logger,  # type: ignore[arg-type]  # any logger will do
            access_log_class=self.access_logger or AbstractAccessLogger,
            auto_decompress=False,  # bodies are inflated under our own limit
        )
        connection.answered = None
        connection.patience = Patience()
        connection.chunks = None
        return connection


class FirstServer(Protocol):
    """Gets every connection before aiohttp does, and gives it what it does not want to answer itself."""

    def open(self, aiohttp_server: AiohttpServer) -> Callable[[], asyncio.BaseProtocol]:
        """Return the factory of its connections."""

    @property
    def connection_count(self) -> int:
        """How many connections it has, without those that it has left to aiohttp."""

    async def close(self, grace_s: float) -> None:
        """Finish what runs within `grace_s` seconds, and close its connections."""


class HttpListener:
    """Serves one bound socket with one handler of all requests."""

    def __init__(
        self,
        sock: socket.socket,
        service: str,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        first: FirstServer | None = None,
        tls: ssl.SSLContext | None = None,
        access_logger: type[AbstractAccessLogger] | None = None,
    ) -> None:
        """`service` is what the title calls it. The listener owns `sock` from `start` on.

        With `tls` connections are encrypted, also those that `first` gets.
        """
        self._sock = sock
        self._handler = handler
        self._first = first
        self._tls = tls
        self._access_logger = access_logger
        self._draining = False
        self.title = f"{service} at {_address_text(sock)}"
        self._connections: AiohttpServer | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen."""
        self._connections = AiohttpServer(self._handle, handler_cancellation=True)
        self._connections.access_logger = self._access_logger
        connect = self._connections if self._first is None else self._first.open(self._connections)
        self._server = await asyncio.get_running_loop().create_server(
            connect,
            sock=self._sock,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
        )

    @property
    def connection_count(self) -> int:
        """How many connections clients have."""
        if self._connections is None:
            return 0
        # A guest serves single requests on a transport that is counted by its owner.
        own = sum(1 for each in self._connections.connections if getattr(each, "answered", None) is None)
        return own if self._first is None else own + self._first.connection_count

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, close idle ones, give requests that run `grace_s` seconds, and close.

        aiohttp's own shutdown drops the body of a request whose headers have come already, so idle
        connections are closed one by one as they become so.
        """
        if self._server is None or self._connections is None:
            return
        server, self._server = self._server, None
        server.close()
        self._draining = True
        async with asyncio.TaskGroup() as tasks:
            if self._first is not None:
                tasks.create_task(self._first.close(grace_s))
            tasks.create_task(self._drain(self._connections, grace_s))
        await self._connections.shutdown(_CLOSE_S)

    async def _drain(self, server: AiohttpServer, grace_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._close_idle(server):  # noqa: ASYNC110  # aiohttp has no event for it
                    await asyncio.sleep(_DRAIN_INTERVAL_S)

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        reply = await self._handler(http)
        if self._draining:
            reply.force_close()
        return reply

    def _close_idle(self, server: AiohttpServer) -> bool:
        """Close connections without a request; whether there are others."""
        connections = [each for each in server.connections if isinstance(each, AiohttpConnection)]
        for connection in connections:
            if connection.idle:
                connection.close()
        return any(not connection.idle for connection in connections)


def _head_byte_size(message: RawRequestMessage) -> int:
    """Return about how many bytes of a request were its head."""
    line = len(message.method) + len(message.path) + len(" HTTP/1.1 \r\n\r\n")
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in message.raw_headers)


def _address_text(sock: socket.socket) -> str:
    """Return where `sock` listens: `0.0.0.0:8000`, `[::]:8000`, or the path of a Unix socket."""
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return str(name)
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
