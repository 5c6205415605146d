from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from kernel.errors import InvalidArgument
from protocols.access import Category
from protocols.http import aiohttp_internals, bodies, routes
from protocols.http.bodies import read_json_text
from protocols.http.client_limits import ClientTimeouts
from protocols.http.routes import Endpoint
from tests.own_records import own_records

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import aiohttp

    from kernel.serving.kernel import Kernel
    from protocols.http.call import HttpCall

    Exchange = Callable[[Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]], None]


async def converse(session: aiohttp.ClientSession, sent: bytes) -> bytes:
    """Send bytes as they are and return everything until the server closes the connection."""
    url = session._base_url
    assert url is not None
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(sent)
        return await reader.read()
    finally:
        writer.close()


_405 = "Method Not Allowed. Did you mean {}?"


@pytest.mark.parametrize(
    ("method", "path", "status", "content_type", "text"),
    [
        ("GET", "/v2/nowhere", 404, "text/plain", "Not Found"),
        ("PUT", "/v3", 404, "text/plain", "Not Found"),
        ("POST", "/v2", 405, "application/json", _405.format("GET /v2")),
        ("OPTIONS", "/v2", 405, "application/json", "Method Not Allowed"),
        ("POST", "/v2/models/echo/config", 405, "application/json", _405.format("GET /v2/models/echo/config")),
        ("GET", "/v2/models/echo/infer", 405, "text/plain", _405.format("POST /v2/models/echo/infer")),
        ("POST", "/v2/health/live", 405, "text/plain", _405.format("GET /v2/health/live")),
        ("POST", "/v2/models/echo/ready", 405, "text/plain", _405.format("GET /v2/models/echo/ready")),
    ],
)
def test_wrong_paths_and_methods(
    exchange: Exchange, method: str, path: str, status: int, content_type: str, text: str
) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.request(method, path) as response:
            assert (response.status, response.headers["Content-Type"]) == (status, content_type)
            assert await response.json(content_type=None) == {"error": text}

    exchange(test)


def test_a_path_that_is_nearly_right_gets_a_hint_behind_the_error(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.post("/v2/models/echo/predict") as response:
            assert response.status == 404
            body = await response.json(content_type=None)
            assert body == {"error": "Not Found. Did you mean POST /v2/models/echo/infer?"}

    exchange(test)


def test_the_error_for_a_wrong_method_lists_the_right_ones(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        for path, allowed in (("/v2/models/echo/infer", "POST"), ("/v2/logging", "GET, POST")):
            async with session.put(path) as response:
                assert response.headers["Allow"] == allowed

    exchange(test)


def test_head_is_refused_without_a_body(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.head("/v2/health/live") as response:
            assert (response.status, await response.read()) == (405, b"")

    exchange(test)


def test_versions_of_other_software_are_not_sent(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2") as response:
            assert response.headers["Server"].startswith("naiad/")

    exchange(test)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v2 HTTP/2.0\r\nHost: x\r\n\r\n",
        b"POST /v2/logging HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v2/logging HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v2/logging HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /v2/logging HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01 hello\r\n\r\n",
        b"GET /v2/models/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_bad_http_is_refused_and_the_connection_closed(
    exchange: Exchange, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        received = await converse(session, sent)
        assert b" 400 Bad Request\r\n" in received
        assert "error" in json.loads(received.partition(b"\r\n\r\n")[2])

    with caplog.at_level(logging.INFO, "protocols"):
        exchange(test)
    assert not own_records(caplog)


def test_broken_chunks_are_refused(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        head = b"POST /v2/logging HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert b" 400 Bad Request\r\n" in await converse(session, head + b"zz\r\n")

    exchange(test)


def test_a_full_url_is_understood(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        sent = b"GET http://anywhere/v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await converse(session, sent)).startswith(b"HTTP/1.1 200 OK\r\n")

    exchange(test)


def test_a_client_that_expects_a_continue_gets_one(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.post("/v2/logging", data=b"{}", expect100=True) as response:
            assert response.status == 200

    exchange(test)


def test_an_announced_size_beyond_all_limits_is_refused_at_once(exchange: Exchange) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        url = session._base_url
        assert url is not None
        for extra in (b"", b"Inference-Header-Content-Length: 9\r\n"):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(
                b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 9223372036854775808\r\n"
                + extra
                + b"\r\n"
            )
            assert (await reader.readline()) == b"HTTP/1.1 400 Bad Request\r\n"
            writer.close()

    exchange(test)


def test_a_body_that_does_not_go_on_is_given_up(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "TIMEOUTS", ClientTimeouts(body_s=0.01))
    monkeypatch.setattr(aiohttp_internals, "TIMEOUTS", ClientTimeouts(unwanted_body_s=0.01))

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        received = await converse(session, b"POST /v2/logging HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{")
        assert received.startswith(b"HTTP/1.1 408 ")

    exchange(test)


@pytest.mark.parametrize("path", ["/v2/logging", "/v2/models/echo/infer"])
def test_a_body_may_not_be_cut_into_too_many_chunks(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(bodies, "MAX_CHUNKS", 100)
    monkeypatch.setattr(aiohttp_internals, "TIMEOUTS", ClientTimeouts(unwanted_body_s=0.01))

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        spaces = b"1\r\n \r\n" * 98
        end = b"2\r\n{}\r\n0\r\n\r\nGET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        received = await converse(session, head + spaces + b"1\r\n \r\n" + end)
        assert received.count(b"HTTP/1.1 ") == 2
        received = await converse(session, head + spaces + b"1\r\n \r\n" * 3)
        assert received.startswith(b"HTTP/1.1 400 ")
        assert b"Chunked request body exceeds maximum of 100 non-empty chunks." in received
        assert b"\r\nConnection: close\r\n" in received

    exchange(test)


def handle_with(monkeypatch: pytest.MonkeyPatch, handler: Callable[[HttpCall], Awaitable[web.StreamResponse]]) -> None:
    """Let `handler` respond to /v2."""
    monkeypatch.setitem(routes.LITERAL_ENDPOINTS, "/v2", Endpoint(Category.HEALTH, {"GET": handler, "POST": handler}))


def test_an_unexpected_exception_is_logged_and_a_number_for_the_client(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(call: HttpCall) -> web.StreamResponse:
        raise ZeroDivisionError("the secret of the server")

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2") as response:
            assert response.status == 500
            text = (await response.json())["error"]
        assert text.startswith("internal error (see ")
        assert "secret" not in text
        (record,) = own_records(caplog)
        assert text.split()[3] in record.getMessage()
        assert record.exc_info is not None

    handle_with(monkeypatch, handler)
    exchange(test)


def test_errors_that_are_not_utf_8_can_be_sent(exchange: Exchange, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handler(call: HttpCall) -> web.StreamResponse:
        raise InvalidArgument("bad file \udcff")

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2") as response:
            assert await response.json() == {"error": "bad file ?"}

    handle_with(monkeypatch, handler)
    exchange(test)


def test_requests_that_run_get_their_responses_before_the_server_stops(
    exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()
    responses: list[Any] = []

    async def handler(call: HttpCall) -> web.StreamResponse:
        text = await read_json_text(call)
        running.set()
        await go_on.wait()
        return web.Response(body=text)

    async def ask(session: aiohttp.ClientSession) -> None:
        async with session.post("/v2", data=b"{}") as response:
            responses.append((response.status, await response.read()))

    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        asking = asyncio.ensure_future(ask(session))
        await running.wait()
        asyncio.get_running_loop().call_later(0.02, go_on.set)  # meanwhile the server stops
        await asyncio.wait([asking])

    handle_with(monkeypatch, handler)
    exchange(test)
    assert responses == [(200, b"{}")]
