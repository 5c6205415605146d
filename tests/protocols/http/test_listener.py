"""Connections that aiohttp serves: how slow clients may be, and how they may cut their bodies."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from protocols.http.aiohttp_internals import AiohttpConnection
from protocols.http.client_limits import TIMEOUTS
from protocols.http.server import HttpServer
from tests.protocols.front_door_lab import listening

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.kernel import Kernel
    from protocols.http.aiohttp_internals import AiohttpServer

    WithKernel = Callable[[Callable[[Kernel], Awaitable[None]]], None]

BODY = json.dumps({"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}]}).encode()
CHUNKED = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def connections(server: HttpServer) -> AiohttpServer:
    found = server.listener.aiohttp_server
    assert found is not None
    return found


async def one_connection(server: HttpServer) -> AiohttpConnection:
    """Return the connection of the only client, as soon as bytes have come."""
    while True:
        for each in connections(server).connections:
            if isinstance(each, AiohttpConnection) and each.slow_client.head_begun:
                return each
        await asyncio.sleep(0)


def exchange(with_kernel: WithKernel, test: Callable[[HttpServer, int, Kernel], Awaitable[None]]) -> None:
    async def run(kernel: Kernel) -> None:
        servers: list[HttpServer] = []

        def make(sock: Any) -> HttpServer:
            servers.append(HttpServer(kernel, sock, fast_path=False))
            return servers[0]

        async with listening(make) as port:
            await test(servers[0], port, kernel)

    with_kernel(run)


def test_a_head_that_does_not_end_closes_the_connection(with_kernel: WithKernel) -> None:
    async def test(server: HttpServer, port: int, kernel: Kernel) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v2 HTTP/1.1\r\nHost: ")
        await one_connection(server)
        now = asyncio.get_running_loop().time()
        connections(server).expire(now)
        assert not reader.at_eof()
        connections(server).expire(now + TIMEOUTS.head_s + 1)
        assert await reader.read() == b""
        writer.close()

    exchange(with_kernel, test)


def test_a_client_that_does_not_read_is_closed_and_its_request_cancelled(
    with_kernel: WithKernel, announce_submit: Callable[[Any], asyncio.Event]
) -> None:
    async def test(server: HttpServer, port: int, kernel: Kernel) -> None:
        model = kernel.resolve("stuck")
        accepted = announce_submit(model)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b'{"IN":1}'
        head = f"POST /v2/models/stuck/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await accepted.wait()
        (connection,) = connections(server).connections
        assert connection.transport is not None
        connection.transport.get_write_buffer_size = lambda: 1000  # type: ignore[method-assign]
        now = asyncio.get_running_loop().time()
        connections(server).expire(now)
        connections(server).expire(now + TIMEOUTS.send_s + 1)
        await model.drain()
        assert model.statistics.failures["CANCELED"] == 1
        writer.close()

    exchange(with_kernel, test)


@pytest.mark.parametrize("extension_byte_size", [0, 256])
def test_chunk_extensions_are_ignored(with_kernel: WithKernel, extension_byte_size: int) -> None:
    async def test(server: HttpServer, port: int, kernel: Kernel) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        extension = b";" + b"e" * (extension_byte_size - 1) if extension_byte_size else b""
        chunks = b"".join(b"1%b\r\n%c\r\n" % (extension, byte) for byte in BODY)
        writer.write(CHUNKED + chunks + b"0\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()

    exchange(with_kernel, test)


@pytest.mark.parametrize("begin", [CHUNKED, CHUNKED + b"1\r\n{\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
def test_long_chunk_extensions_are_refused(with_kernel: WithKernel, begin: bytes, at_once: bool) -> None:
    async def test(server: HttpServer, port: int, kernel: Kernel) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for part in [begin + b"1;" + b"e" * (64 << 10)] if at_once else [begin, b"1;" + b"e" * (64 << 10)]:
            writer.write(part)
            await writer.drain()
        response = await reader.readuntil(b"}")
        assert response.startswith(b"HTTP/1.1 400 ")
        assert response.endswith(b'{"error":"the request body is malformed: chunk extensions are too long"}')
        assert await reader.read() == b""
        writer.close()

    exchange(with_kernel, test)
