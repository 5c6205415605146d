"""The connections of `naiad shadow-of`: bytes go unchanged to the other server and back, and are read on their way.

A connection whose bytes are not HTTP/1.1, such as one of gRPC, is passed on without being read. The client never waits
for our server: what waits for it is bounded in number and bytes, and the rest is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from typing import TYPE_CHECKING

import aiohttp
import httptools

from kernel.background import BackgroundTasks
from kernel.tools.shadow_of import (
    MOST_BODY_BYTE_SIZE,
    CopiedResponse,
    Exchange,
    Message,
    NotCompared,
    check_request,
    compare_exchange,
    is_inference,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.tools.shadow_of import Comparison, ProxySettings

_PIECE = 64 << 10

#: The most bytes of all exchanges that come or wait.
_MOST_WAITING_BYTE_SIZE = 64 << 20

#: The most requests of one connection without a response (pipelining): beyond that it is not read any more.
_MOST_OPEN = 64

_CONNECT_S = 10.0

#: How long a peer may take to read what is left when its connection is closed.
_CLOSE_S = 5.0

#: Seconds until our server counts as busy.
_COPY_S = 60.0

#: Headers of one connection, which are not copied.
_OF_CONNECTION = frozenset(
    ("connection", "content-length", "expect", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade")
)


async def run_proxy(
    listen: tuple[str, int], old: tuple[str, int], ours: str, settings: ProxySettings, compared: Comparison,
    listening: Callable[[int], object], stop: asyncio.Event,
) -> None:  # fmt: skip
    """Pass connections on and compare until `stop` is set. Raises OSError if the port cannot be used."""
    copies = Copies(ours, settings, compared)
    connections: set[asyncio.Task[None]] = set()

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await pass_on(reader, writer, old, Tap(copies))
        finally:
            connections.discard(task)

    server = await asyncio.start_server(passed_on, *listen, limit=_PIECE)
    async with server, copies:
        listening(server.sockets[0].getsockname()[1])
        await stop.wait()
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, old: tuple[str, int], tap: Tap) -> None:
    """Pass one connection on until both sides have ended, or one is lost."""
    try:
        try:
            async with asyncio.timeout(_CONNECT_S):
                its_reader, its_writer = await asyncio.open_connection(*old, limit=_PIECE)
        except (OSError, TimeoutError):
            return  # as if the other server did not listen
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, its_writer, tap.of_client))
                both.create_task(_pump(its_reader, writer, tap.of_server))
        except* OSError:
            pass  # a side has closed the connection: the other one sees that too
        finally:
            tap.close()
            await _closed(its_writer)
    finally:
        await _closed(writer)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, read: Callable[[bytes], None]) -> None:
    while data := await reader.read(_PIECE):
        writer.write(data)
        read(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        async with asyncio.timeout(_CLOSE_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()
    except asyncio.CancelledError:
        writer.transport.abort()
        raise


class _Reading:
    """Takes what a parser of `httptools` finds: one message after the other."""

    def __init__(
        self, copies: Copies, wanted: Callable[[_Reading], bool], ended: Callable[[_Reading], None]
    ) -> None:  # fmt: skip
        """`wanted` says at the end of the headers whether the body is kept."""
        self._copies = copies
        self._wanted = wanted
        self._ended = ended
        self._begin()

    def _begin(self) -> None:
        self.target = b""
        self.headers: dict[str, str] = {}
        #: None if it is not kept.
        self.body: bytearray | None = None
        self.is_wanted = False
        #: Why the body of a wanted message was not kept.
        self.trouble = ""

    def forget(self) -> None:
        """Give back what is kept of the message that comes."""
        if self.body is not None:
            self._copies.give_back(len(self.body))
            self.body = None

    # ---- callbacks of the parser ---------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.is_wanted = self._wanted(self)
        self.body = bytearray() if self.is_wanted else None

    def on_body(self, body: bytes) -> None:
        if self.body is None:
            return
        if len(self.body) + len(body) > MOST_BODY_BYTE_SIZE:
            self.trouble = "bodies that are too large"
        elif not self._copies.keep(len(body)):
            self.trouble = "too many wait"
        else:
            self.body += body
            return
        self.forget()

    def on_message_complete(self) -> None:
        self._ended(self)
        self._begin()

    def message(self) -> Message | None:
        """Return the message, None if it is not kept. Who gets it gives its bytes back."""
        return None if self.body is None else Message(self.headers, bytes(self.body))


class Tap:
    """Reads the bytes of one connection in both directions."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._request = _Reading(copies, self._wants_request, self._request_ended)
        self._response = _Reading(copies, self._wants_response, self._response_ended)
        self._requests = httptools.HttpRequestParser(self._request)
        self._responses = httptools.HttpResponseParser(self._response)
        #: Requests without a response: path and message of those that may be copied, None for others.
        self._open: deque[tuple[str, Message] | None] = deque()
        #: Whether the bytes are read.
        self._reads = True

    def of_client(self, data: bytes) -> None:
        """Read bytes of the client."""
        self._read(self._requests, data)

    def of_server(self, data: bytes) -> None:
        """Read bytes of the other server."""
        self._read(self._responses, data)

    def _read(self, parser: httptools.HttpRequestParser | httptools.HttpResponseParser, data: bytes) -> None:
        if not self._reads:
            return
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._stop()

    def _stop(self) -> None:
        """Read no more of this connection: it is not understood."""
        if self._reads:
            self.close()
            self._copies.compared.unread_connections += 1

    def close(self) -> None:
        """The connection ends, or is not read any more: what is kept of it is given back."""
        self._reads = False
        for found in filter(None, self._open):
            self._copies.give_back(len(found[1].body))
            self._copies.compared.drop("incomplete responses")
        self._open.clear()
        if self._request.is_wanted:
            self._copies.compared.drop("incomplete requests")
            self._request.is_wanted = False
        for reading in (self._request, self._response):
            reading.forget()

    def _wants_request(self, reading: _Reading) -> bool:
        return self._copies.wants(self._requests.get_method().decode(), reading.target.decode("latin-1"))

    def _wants_response(self, reading: _Reading) -> bool:
        return self._responses.get_status_code() >= 200 and bool(self._open) and self._open[0] is not None

    def _request_ended(self, reading: _Reading) -> None:
        if self._requests.get_method() == b"HEAD" or len(self._open) >= _MOST_OPEN:
            self._stop()  # the parser of responses would take the next response for the body
            return
        message = reading.message()
        if message is None and reading.is_wanted:
            self._copies.compared.drop(reading.trouble)
        self._open.append(None if message is None else (reading.target.decode("latin-1"), message))

    def _response_ended(self, reading: _Reading) -> None:
        status = self._responses.get_status_code()
        if status < 200:  # 100 Continue comes before the response
            return
        if not self._open:  # a response to a request that is not complete: which one is next is not known any more
            self._stop()
            return
        found = self._open.popleft()
        response = reading.message()
        reading.forget()
        if found is None:
            return
        path, request = found
        self._copies.give_back(len(request.body))
        if response is None:
            self._copies.compared.drop(reading.trouble)
        else:
            self._copies.add(Exchange(path, request, status, response))


class Copies:
    """Sends copies of requests to our server and compares the responses. An async context manager."""

    def __init__(self, url: str, settings: ProxySettings, compared: Comparison) -> None:
        self._url = url
        self._settings = settings
        self.compared = compared
        self._waiting: deque[Exchange] = deque()
        #: Of exchanges that wait or are compared, and of messages that come.
        self._byte_size = self._kept_byte_size = 0
        self._running = BackgroundTasks()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Copies:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_COPY_S, sock_connect=_CONNECT_S), auto_decompress=False
        )
        return self

    async def __aexit__(self, *errors: object) -> None:
        """Wait for what runs, at most for a moment, and drop the rest."""
        for _ in range(len(self._waiting)):
            self._drop(self._waiting.popleft(), "the comparison was ended")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._running.wait()
        await self._running.close()
        assert self._session is not None
        await self._session.close()

    def wants(self, method: str, target: str) -> bool:
        """Whether a request is copied, which is drawn once for each."""
        if not is_inference(method, target):
            return False
        percent = self._settings.percent
        if percent < 100 and random.random() * 100 >= percent:
            return False
        self.compared.report.sampled += 1
        return True

    def keep(self, byte_size: int) -> bool:
        """Count bytes of a message that comes. Returns False if there is no room for them."""
        if self._byte_size + self._kept_byte_size + byte_size > _MOST_WAITING_BYTE_SIZE:
            return False
        self._kept_byte_size += byte_size
        return True

    def give_back(self, byte_size: int) -> None:
        """Bytes of a message that comes are not kept any more, or are counted with their exchange."""
        self._kept_byte_size -= byte_size

    def add(self, exchange: Exchange) -> None:
        """Let an exchange be compared soon."""
        byte_size = _byte_size(exchange)
        kept = self._byte_size + self._kept_byte_size
        if len(self._waiting) >= self._settings.waiting or kept + byte_size > _MOST_WAITING_BYTE_SIZE:
            self.compared.drop("too many wait")
            return
        self._byte_size += byte_size
        self._waiting.append(exchange)
        self._begin()

    def _begin(self) -> None:
        while self._waiting and self._running.count < self._settings.concurrency:
            # Its end begins the next one.
            self._running.start(self._copy(self._waiting.popleft())).add_done_callback(lambda _: self._begin())

    async def _copy(self, exchange: Exchange) -> None:
        try:
            id, classes = await asyncio.to_thread(check_request, exchange.request)
            copied = await self._send(exchange)
            found = await asyncio.to_thread(compare_exchange, exchange, copied, classes, self.compared.rules)
            self.compared.add(exchange.path, id, found)
        except NotCompared as reason:
            self.compared.drop(str(reason))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):  # ValueError: of a header
            self.compared.drop("our server has not responded")
        except asyncio.CancelledError:
            self.compared.drop("the comparison was ended")
            raise
        finally:
            self._byte_size -= _byte_size(exchange)

    async def _send(self, exchange: Exchange) -> CopiedResponse:
        assert self._session is not None
        headers = {name: value for name, value in exchange.request.headers.items() if name not in _OF_CONNECTION}
        async with self._session.post(
            f"{self._url}{exchange.path}", data=exchange.request.body, headers=headers
        ) as response:
            body = bytearray()
            async for piece in response.content.iter_chunked(_PIECE):
                body += piece
                if len(body) > MOST_BODY_BYTE_SIZE:
                    raise NotCompared("bodies that are too large")
            found = {name.lower(): value for name, value in response.headers.items()}
            return CopiedResponse(response.status, Message(found, bytes(body)))

    def _drop(self, exchange: Exchange, reason: str) -> None:
        self._byte_size -= _byte_size(exchange)
        self.compared.drop(reason)


def _byte_size(exchange: Exchange) -> int:
    return len(exchange.request.body) + len(exchange.response.body)
