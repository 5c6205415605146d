"""What `protocols/http/aiohttp_internals.py` uses of aiohttp without a promise: an update that breaks it fails here."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections import deque
from typing import TYPE_CHECKING

import pytest
from aiohttp import StreamReader, web
from aiohttp.http_parser import RawRequestMessage

from protocols.http import web as our_web
from protocols.http.aiohttp_internals import AiohttpServer, check_not_begun, is_response_begun, send_continue
from protocols.http.bodies import read_body
from protocols.http.responses import empty_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from protocols.http.aiohttp_internals import AiohttpConnection

    Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

GET = b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_what_we_use_of_aiohttp_web_is_what_aiohttp_offers_there() -> None:
    for name in our_web.__all__:
        assert getattr(our_web, name) is getattr(web, name)


class FakeTransport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def is_reading(self) -> bool:
        return self.reading

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


def run(handler: Handler, test: Callable[[AiohttpServer, AiohttpConnection, FakeTransport], Awaitable[None]]) -> None:
    async def main() -> None:
        server, transport = AiohttpServer(handler, handler_cancellation=True), FakeTransport()
        connection = server()
        connection.connection_made(transport)
        async with asyncio.timeout(60):  # what does not happen any more must not be waited for
            await test(server, connection, transport)
        connection.connection_lost(None)
        await server.shutdown(1)

    asyncio.run(main())


async def nothing(http: web.BaseRequest) -> web.StreamResponse:
    return empty_response()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # what aiohttp's tasks do, for which there is no event
        await asyncio.sleep(0)


# ---- signatures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (web.RequestHandler.data_received, ["self", "data"]),
        (web.RequestHandler.connection_made, ["self", "transport"]),
        (web.RequestHandler.connection_lost, ["self", "exc"]),
        (web.RequestHandler.finish_response, ["self", "request", "resp", "start_time"]),
        (web.RequestHandler.handle_error, ["self", "request", "status", "exc", "message"]),
        (web.RequestHandler.close, ["self"]),
        (web.Server.__call__, ["self"]),
        (web.Server.connection_made, ["self", "handler", "transport"]),
        (web.Server.shutdown, ["self", "timeout"]),
        (StreamReader.feed_eof, ["self"]),
    ],
)
def test_what_is_overridden_or_called_has_the_parameters_that_we_know(
    method: Callable[..., object], parameters: list[str]
) -> None:
    assert list(inspect.signature(method).parameters) == parameters


def test_a_connection_takes_the_arguments_that_we_give() -> None:
    given = {
        "loop", "keepalive_timeout", "lingering_time", "logger", "access_log", "access_log_class", "auto_decompress",
    }  # fmt: skip
    assert given <= inspect.signature(web.RequestHandler).parameters.keys()


# ---- what a connection is doing --------------------------------------------------------------


def test_a_request_stands_last_among_the_messages_as_soon_as_its_head_was_received() -> None:
    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        assert isinstance(connection._messages, deque)
        assert not connection._messages
        connection.data_received(CHUNKED[:20])
        assert not connection._messages
        connection.data_received(CHUNKED[20:])
        [(message, content)] = connection._messages
        assert isinstance(message, RawRequestMessage)
        assert isinstance(content, StreamReader)
        assert message.chunked
        assert (message.method, message.path) == ("POST", "/")
        assert message.raw_headers == ((b"Host", b"x"), (b"Transfer-Encoding", b"chunked"))

    run(nothing, test)


def test_a_connection_is_idle_but_from_the_head_of_a_request_to_its_response() -> None:
    go_on = asyncio.Event()
    seen: list[web.BaseRequest] = []

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        seen.append(http)
        await go_on.wait()
        return empty_response()

    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        assert connection.idle
        connection.data_received(GET)
        assert connection._current_request is None
        assert not connection.idle
        await until(lambda: bool(seen))
        assert connection._current_request is seen[0]
        assert not connection._messages
        assert not connection.idle
        go_on.set()
        await until(lambda: bool(transport.written))
        assert connection.idle

    run(handler, test)


def test_a_server_knows_its_connections_and_its_loop() -> None:
    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        assert server.connections == [connection]
        assert server._loop is connection._loop is asyncio.get_running_loop()

    run(nothing, test)


def test_a_connection_that_is_closed_takes_no_more_requests() -> None:
    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.close()
        connection.data_received(GET)
        assert not connection._messages

    run(nothing, test)


def test_a_connection_that_leaves_its_transport_does_not_close_it() -> None:
    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(GET)
        await until(lambda: bool(transport.written))
        connection.leave_transport()
        await until(lambda: not server.connections)
        assert not transport.closed

    run(nothing, test)


# ---- responses -------------------------------------------------------------------------------


def test_every_response_goes_through_finish_response() -> None:
    responded: list[bool] = []

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        if http.path == "/raise":
            raise ValueError("a bug")
        return empty_response()

    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.on_response = responded.append
        connection.data_received(GET)
        await until(lambda: len(responded) == 1)
        connection.data_received(b"GET /raise HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: len(responded) == 2)

    run(handler, test)
    assert responded == [True, False]


@pytest.mark.parametrize(("sent", "status"), [(b"GET /\x00 HTTP/9\r\n\r\n", 400), (GET, 500)])
def test_handle_error_makes_the_response_to_bytes_that_are_not_http_and_to_exceptions(sent: bytes, status: int) -> None:
    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        raise ValueError("a bug")

    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(sent)
        await until(lambda: transport.closed)
        assert transport.written.split(b" ")[1] == str(status).encode()
        assert b'{"error":' in transport.written, "our form of an error"

    run(handler, test)


def test_whether_a_response_was_begun_is_known() -> None:
    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        assert not is_response_begun(http)
        check_not_begun(http)
        response = web.StreamResponse()
        await response.prepare(http)
        await response.write(b"a")
        assert is_response_begun(http)
        with pytest.raises(ConnectionError):
            check_not_begun(http)
        return response

    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(GET)
        await until(lambda: transport.written.endswith(b"0\r\n\r\n"))

    run(handler, test)


def test_a_client_may_be_asked_for_its_body_before_the_response() -> None:
    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        await send_continue(http)
        assert not is_response_begun(http)
        return web.Response(body=await http.content.read())

    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        await until(lambda: bool(transport.written))
        assert transport.written == b"HTTP/1.1 100 Continue\r\n\r\n", "and aiohttp sends none of its own"
        connection.data_received(b"abc")
        await until(lambda: transport.written.endswith(b"\r\n\r\nabc"))
        assert transport.written.count(b"HTTP/1.1 ") == 2

    run(handler, test)


# ---- bodies ----------------------------------------------------------------------------------


def test_the_bytes_of_a_body_are_counted_without_what_frames_them() -> None:
    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(CHUNKED)
        [(_, content)] = connection._messages
        assert content.total_bytes == 0
        connection.data_received(b"3;extension\r\nabc\r\n")
        assert content.total_bytes == 3
        assert not content.is_eof()
        connection.data_received(b"0\r\n\r\n")
        assert content.is_eof()

    run(nothing, test)


def test_a_body_that_is_ended_with_an_error_raises_it_where_it_is_read() -> None:
    raised: list[str] = []

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        try:
            await read_body(http, 1000, lambda byte_size: AssertionError())  # type: ignore[arg-type,return-value]
        except Exception as error:
            raised.append(str(error))
        return empty_response()

    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(CHUNKED + b"1\r\na\r\n")
        [(_, content)] = connection._messages
        content.set_exception(web.RequestPayloadError("too odd"))
        content.feed_eof()
        await until(lambda: bool(transport.written))

    run(handler, test)
    assert raised == ["the request body is malformed: too odd"]


def test_bodies_are_left_compressed() -> None:
    bodies: list[bytes] = []

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        bodies.append(await http.content.read())
        return empty_response()

    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Encoding: gzip\r\n\r\nabcd"
        )
        await until(lambda: bool(transport.written))

    run(handler, test)
    assert bodies == [b"abcd"]


def test_many_small_chunks_are_parsed_in_several_iterations_and_more_is_read_only_when_all_are() -> None:
    chunks = b"1\r\nx\r\n" * 20_000
    bodies: list[bytes] = []

    async def handler(http: web.BaseRequest) -> web.StreamResponse:
        bodies.append(await read_body(http, 100_000, lambda byte_size: pytest.fail("too large")))
        return empty_response()

    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(CHUNKED + chunks)
        assert not transport.reading
        assert sum(map(len, connection.slices)) == len(CHUNKED + chunks), "nothing was parsed in this iteration"
        waiting = []
        while connection.slices:
            waiting.append(sum(map(len, connection.slices)))
            assert not transport.reading, "what comes meanwhile would pile up"
            await asyncio.sleep(0)
        steps = [before - after for before, after in itertools.pairwise(waiting)]
        assert max(steps) <= 4096
        await until(lambda: transport.reading)
        connection.data_received(b"0\r\n\r\n")
        await until(lambda: b"200 OK" in transport.written)
        assert bodies == [b"x" * 20_000]

    run(handler, test)


def test_a_connection_that_is_lost_forgets_what_was_not_parsed() -> None:
    async def test(server: AiohttpServer, connection: AiohttpConnection, transport: FakeTransport) -> None:
        connection.data_received(CHUNKED + b"1\r\nx\r\n" * 5_000)
        connection.connection_lost(None)
        await until(lambda: not connection.slices)

    run(nothing, test)
