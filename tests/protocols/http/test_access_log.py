"""The access log of the HTTP front door: a line for each request, whatever becomes of it."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from protocols.http.server import HttpServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

_BODY = {"id": "an id", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.5]}]}


@pytest.fixture(params=[True, False], ids=["fast path", "aiohttp"])
def talk(request: pytest.FixtureRequest, with_kernel: WithKernel) -> Callable[..., None]:
    """Return a function that runs a coroutine function with a client of a server that logs every request."""

    def run(test: Callable[[aiohttp.ClientSession, Kernel], Awaitable[None]]) -> None:
        async def inner(kernel: Kernel) -> None:
            sock = socket.socket()
            sock.bind(("127.0.0.1", 0))
            server = HttpServer(kernel, sock, fast_path=request.param, log_access=True)
            await server.start()
            try:
                async with aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session:
                    await test(session, kernel)
            finally:
                await server.stop(1.0)

        with_kernel(inner)

    return run


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the access log, without what differs from run to run."""
    found = [record.getMessage() for record in caplog.records if record.name == "access"]
    assert all(line.startswith("127.0.0.1:") for line in found)
    return [re.sub(r" (in|out|ms)=[-0-9.]+", "", line.partition(" ")[2]) for line in found]


def test_every_request_gets_a_line(talk: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        for path in ("/v2", "/v2/models/echo/versions/1?a=b", "/v2/models/none", "/nowhere"):
            async with session.get(path) as response:
                await response.read()
        for path in ("/v2/models/echo/infer", "/v2/models/echo/versions/7/infer"):
            async with session.post(path, json=_BODY) as response:
                await response.read()
        body = {"id": "s", "IN": [1, 2]}
        async with session.post("/v2/models/repeat/generate_stream", json=body) as response:
            await response.read()

    with caplog.at_level(logging.INFO, "access"):
        talk(test)
    assert lines(caplog) == [
        "GET /v2 200",
        "GET /v2/models/echo/versions/1?a=b 200 model=echo version=1",
        "GET /v2/models/none 404 model=none",
        "GET /nowhere 404",
        "POST /v2/models/echo/infer 200 model=echo id=an id",
        "POST /v2/models/echo/versions/7/infer 404 model=echo version=7",
        "POST /v2/models/repeat/generate_stream 200 model=repeat id=s",
    ]


def test_a_client_that_does_not_wait_gets_a_line(
    talk: Callable[..., None], announce_submit: Callable[[Model], asyncio.Event], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        submitted = announce_submit(kernel.resolve("stuck", ""))
        call = asyncio.ensure_future(session.post("/v2/models/stuck/infer", json=_BODY))
        await submitted.wait()
        call.cancel()

    with caplog.at_level(logging.INFO, "access"):
        talk(test)
    assert lines(caplog) == ["POST /v2/models/stuck/infer 499 model=stuck id=an id"]


def test_bytes_that_are_not_http_get_a_line(talk: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        url = session._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET / BAD\r\n\r\n")
        await reader.read()
        writer.close()

    with caplog.at_level(logging.INFO, "access"):
        talk(test)
    assert [line.split()[2] for line in lines(caplog)] == ["400"]


def test_without_the_option_nothing_is_logged(exchange: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    async def test(session: aiohttp.ClientSession, kernel: Kernel) -> None:
        async with session.get("/v2") as response:
            await response.read()

    with caplog.at_level(logging.INFO, "access"):
        exchange(test)
    assert lines(caplog) == []


# ---- --log-verbose=1 ----------------------------------------------------------------------------


@pytest.mark.parametrize("fast_path", [True, False])
def test_a_verbose_log_has_tritons_line_for_each_request_that_comes(
    with_kernel: WithKernel, caplog: pytest.LogCaptureFixture, fast_path: bool
) -> None:
    async def test(kernel: Kernel) -> None:
        kernel.log.update({"log_verbose_level": 1})
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        server = HttpServer(kernel, sock, fast_path=fast_path)
        await server.start()
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session:
                for method, path in (("GET", "/v2?a=b"), ("DELETE", "/v2"), ("POST", "/v2/models/none/infer")):
                    async with session.request(method, path, json=_BODY if method == "POST" else None) as response:
                        await response.read()
                for _ in range(2):  # the second is taken as the first was
                    async with session.post("/v2/models/echo/infer", json=_BODY) as response:
                        await response.read()
        finally:
            await server.stop(1.0)

    with caplog.at_level(logging.DEBUG, "protocols.http.access_log"):
        with_kernel(test)
    assert [record.getMessage() for record in caplog.records if record.name == "protocols.http.access_log"] == [
        "HTTP request: 0 /v2",
        "HTTP request: 4 /v2",
        "HTTP request: 2 /v2/models/none/infer",
        "HTTP request: 2 /v2/models/echo/infer",
        "HTTP request: 2 /v2/models/echo/infer",
    ]
    assert lines(caplog) == []


def test_connections_that_are_open_follow_the_level_of_the_log(
    with_kernel: WithKernel, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(kernel: Kernel) -> None:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        server = HttpServer(kernel, sock)
        await server.start()
        fast_path: Any = server._listener.first
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{sock.getsockname()[1]}") as session:
                for level in (0, 1, 0):
                    kernel.log.update({"log_verbose_level": level})
                    fast_path.expire(fast_path.now_s)  # as it does each second
                    async with session.post("/v2/models/echo/infer", json={**_BODY, "id": str(level)}) as response:
                        assert response.status == 200
                        await response.read()
        finally:
            await server.stop(1.0)

    with caplog.at_level(logging.DEBUG, "protocols.http.access_log"):
        with_kernel(test)
    found = [record.getMessage() for record in caplog.records if record.name == "protocols.http.access_log"]
    assert found == ["HTTP request: 2 /v2/models/echo/infer"]
