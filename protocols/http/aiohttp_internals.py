"""All undocumented parts of aiohttp that we use. No other module uses them.

An update of aiohttp may break what is here: `tests/protocols/http/test_aiohttp_internals.py` says so first. Used are

- `web.RequestHandler` as a base class, with its constructor's arguments; it serves a whole connection.
  We override `data_received` (to see what came), `finish_response` (called for every response, errors too)
  and `handle_error` (called for what is not HTTP and for handlers that raise). Its `_loop`, its `_messages` (requests
  that were received, with their bodies, the newest one last), and its `_current_request` (while a handler runs)
  say what a connection is doing. Without a `transport` it closes none.
- `_reading_paused`, `_buffer_paused`, `_pause_transport_reading` and `_resume_transport_reading` of a connection: its
  own flow control, which ours takes part in; `data_received(b"")` is how it continues.
- `web.Server` as a base class: `__call__` makes a connection, `connection_made` learns of it, `_loop`.
- `RawRequestMessage` of `aiohttp.http_parser`: how a request is framed, and how large its head was.
- `StreamReader.total_bytes`, `set_exception` and `feed_eof`: how much of a body has come, and how to end it.
- `request.writer`: `output_size` counts what was sent of a response, and `write` sends before there is one.

aiohttp on the transport of a fast-path connection: it serves single messages that the fast path gives it.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_parser import RawRequestMessage

from kernel.observe.limited_log import LimitedLog
from kernel.texts import MAX_TEXT_BYTE_SIZE, limited
from protocols.http import web
from protocols.http.client_limits import MAX_CHUNKS, TIMEOUTS, ChunkOverhead, SlowClient, abort_gone
from protocols.http.responses import error_response

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from aiohttp import StreamReader

logger = logging.getLogger(__name__)

_failures = LimitedLog(logger)

#: How much of what has come is parsed in an event-loop iteration. Chunks of one byte take 1 us a byte.
_SLICE_BYTE_SIZE = 4096

#: How often connections are checked, which is also how exact their times are.
_TICK_S = 1.0

#: Stands for no limit: a connection on the fast path's transport is closed by the fast path.
_NEVER_S = 365 * 24 * 3600.0


class AiohttpConnection(web.RequestHandler):
    """A connection that responds to bytes that are not HTTP with our errors, and logs them at debug level."""

    __slots__ = ("chunks", "going_on", "on_response", "slices", "slow_client")

    #: Called after each response, with whether the connection stays open. None for connections with a transport of
    #: their own.
    on_response: Callable[[bool], None] | None
    slow_client: SlowClient
    #: The body that comes, where it is chunked.
    chunks: tuple[ChunkOverhead, StreamReader] | None
    #: What has come and was not parsed yet, and whether `_parse_next` will be called for it.
    slices: deque[bytes]
    going_on: bool

    def data_received(self, data: bytes) -> None:
        """Parse what has come, at most `_SLICE_BYTE_SIZE` of it in an event-loop iteration: small chunks take long."""
        if not data:  # aiohttp calls itself, when it reads on
            super().data_received(data)
            self._schedule()
        elif self.on_response is None and (self.slices or len(data) > _SLICE_BYTE_SIZE):
            for start in range(0, len(data), _SLICE_BYTE_SIZE):
                self.slices.append(data[start : start + _SLICE_BYTE_SIZE])
            self._pause_transport_reading()
            self._schedule()
        else:
            self._parse(data)

    def _schedule(self) -> None:
        if self.slices and not self.going_on:
            self.going_on = True
            self._loop.call_soon(self._parse_next)

    def _parse_next(self) -> None:
        """Parse the next slice, unless aiohttp has paused reading."""
        self.going_on = False
        if self.transport is None:
            self.slices.clear()
        if not self.slices or self._reading_paused:
            return
        self._parse(self.slices.popleft())
        if self.slices:
            self._schedule()
        elif not self._reading_paused and not self._buffer_paused:
            self._resume_transport_reading()

    def _resume_transport_reading(self) -> None:
        """Read on, unless what has come was not parsed yet: it would pile up."""
        if not self.slices:
            super()._resume_transport_reading()

    def _parse(self, data: bytes) -> None:
        known = self._messages[-1] if self._messages else None
        super().data_received(data)
        self.slow_client.received(self._loop.time(), idle=self.idle)
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
            self.close()  # when the handler has responded; nothing is read any more

    def expire(self, now: float) -> None:
        """End the connection where the client has kept it waiting for too long."""
        transport = self.transport
        if transport is None or self.on_response is not None:  # the fast path watches its own transport
            return
        if self.slow_client.is_too_slow(now, idle=self.idle, unsent=transport.get_write_buffer_size()):
            transport.abort()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        sent, lost = await super().finish_response(request, resp, start_time)
        if self.on_response is not None and not lost:
            self.on_response(bool(sent.keep_alive))
        return sent, lost

    def leave_transport(self) -> None:
        """End without closing the transport, which another protocol continues with."""
        self.transport = None
        self.connection_lost(None)

    @property
    def paused_transport(self) -> asyncio.Transport | None:
        """The transport, where a request is served and nothing is read, so that no end would be noticed."""
        if self.transport is None or self.on_response is not None:  # the fast path watches its own transport
            return None
        return None if self.idle or self.transport.is_reading() else self.transport

    @property
    def idle(self) -> bool:
        """Whether no request is being received or served."""
        return self._current_request is None and not self._messages

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        check_not_begun(request)
        if status >= 500:
            _failures.log("the server", "request from %s failed", request.remote, exc_info=exc)
        else:
            logger.debug("bad request from %s: %s", request.remote, message)
        response = error_response(status, limited(message or "internal error", MAX_TEXT_BYTE_SIZE), plain=True)
        response.force_close()
        return response


class AiohttpServer(web.Server):
    """Makes the connections that aiohttp serves."""

    #: Called with every response that was sent. None for no access log.
    access_logger: type[AbstractAccessLogger] | None = None

    #: Goes while there are connections.
    _timer: asyncio.TimerHandle | None = None

    def __call__(self) -> AiohttpConnection:
        return self._connection(TIMEOUTS.idle_s)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self._tick)

    def expire(self, now: float) -> None:
        """Let all connections look at the time `now`."""
        for connection in list(self.connections):
            if isinstance(connection, AiohttpConnection):
                connection.expire(now)
        abort_gone(
            [
                paused
                for each in self.connections
                if isinstance(each, AiohttpConnection) and (paused := each.paused_transport) is not None
            ]
        )

    def _tick(self) -> None:
        self.expire(self._loop.time())
        self._timer = self._loop.call_later(_TICK_S, self._tick) if self.connections else None

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # aiohttp's name
        await super().shutdown(timeout)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def shared_connection(self, on_response: Callable[[bool], None]) -> AiohttpConnection:
        """Return a connection that shares a transport with the fast path; see `AiohttpConnection.on_response`."""
        connection = self._connection(_NEVER_S)
        connection.on_response = on_response
        return connection

    def _connection(self, keepalive_timeout: float) -> AiohttpConnection:
        connection = AiohttpConnection(
            self,
            loop=self._loop,
            keepalive_timeout=keepalive_timeout,
            lingering_time=TIMEOUTS.unwanted_body_s,
            logger=logger,
            # None turns it off, as web.run_app does.
            access_log=None if self.access_logger is None else logger,  # type: ignore[arg-type]  # any logger will do
            access_log_class=self.access_logger or AbstractAccessLogger,
            auto_decompress=False,  # bodies are inflated under our own limit
        )
        connection.on_response = None
        connection.slow_client = SlowClient()
        connection.chunks = None
        connection.slices = deque()
        connection.going_on = False
        return connection


def is_response_begun(request: web.BaseRequest) -> bool:
    """Whether bytes of the response have been sent, so that it can no longer be replaced by an error."""
    return request.writer.output_size > 0


def check_not_begun(request: web.BaseRequest) -> None:
    """Raise `ConnectionError`, which ends the connection, where the response has been begun."""
    if is_response_begun(request):
        raise ConnectionError("the response has been begun, an error cannot be sent any more")


async def send_continue(request: web.BaseRequest) -> None:
    """Let a client that asked for it send the body."""
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # nothing of the response has been sent


def _head_byte_size(message: RawRequestMessage) -> int:
    """Return about how many bytes of a request were its head."""
    line = len(message.method) + len(message.path) + len(" HTTP/1.1 \r\n\r\n")
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in message.raw_headers)


class SharedAiohttp:
    """The aiohttp connection of one transport, made when the first message is for it."""

    def __init__(self, transport: asyncio.Transport, on_response: Callable[[bool], None]) -> None:
        """`on_response` is called after each response, with whether the connection stays open."""
        self._transport = transport
        self._on_response = on_response
        self._connection: AiohttpConnection | None = None
        #: Whether a message was begun that has no response yet.
        self.busy = False

    def begin(self, server: AiohttpServer, head: bytes) -> None:
        """Begin a message with its head."""
        if self._connection is None:
            self._connection = server.shared_connection(self._responded)
            self._connection.connection_made(self._transport)
        self.busy = True
        self._connection.data_received(head)

    def feed(self, part: bytes) -> None:
        """Give the next bytes of the message, whose response may have been sent already."""
        assert self._connection is not None, "no message was begun"
        self._connection.data_received(part)

    def pause_writing(self) -> None:
        """Nothing more can be written for now. May be called again."""
        if self._connection is not None and not self._connection.writing_paused:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Something can be written. May be called again: responses of the fast path wait, too."""
        if self._connection is not None and self._connection.writing_paused:
            self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._connection.connection_lost(exc)

    def leave_transport(self) -> None:
        """Serve no more messages; the transport stays open."""
        if self._connection is not None:
            self._connection.leave_transport()

    def _responded(self, stays_open: bool) -> None:
        self.busy = False
        self._on_response(stays_open)
