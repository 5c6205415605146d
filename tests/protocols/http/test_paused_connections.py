"""A client that has gone is noticed also where nothing is read from its connection, and its requests are cancelled."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import struct
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from kernel.options import HttpOptions
from protocols.http.fast.fast_path import FastPath
from protocols.http.server import HttpServer
from tests.protocols.front_door_lab import listening

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kernel.serving.kernel import Kernel
    from tests.protocols.certificates import Certificates

    WithKernel = Callable[..., None]

BODY = json.dumps({"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1]}]}).encode()
GENERATED = b'{"IN":1}'


def post(path: str, body: bytes) -> bytes:
    return f"POST /v2/models/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


#: What makes a connection pause, by name: bytes, whether the fast path gets them, how many requests are submitted.
SENT = {
    "requests of the fast path": (post("stuck/infer", BODY) * 40, True, 32),
    "one for aiohttp, and others behind it": (
        post("stuck/generate", GENERATED) + post("stuck/infer", BODY) * 3000,
        True,
        1,
    ),
    "requests for aiohttp": (post("stuck/generate", GENERATED) * 2000, False, 1),
}


def end(sock: socket.socket) -> None:
    sock.close()


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def end_sending(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def look(server: HttpServer) -> None:
    """Let the connections look at the time, as they do once a second."""
    listener, now_s = server.listener, asyncio.get_running_loop().time()
    if isinstance(listener.first, FastPath):
        listener.first.expire(now_s)
    assert listener.aiohttp_server is not None
    listener.aiohttp_server.expire(now_s)


def is_paused(server: HttpServer) -> bool:
    listener = server.listener
    assert listener.aiohttp_server is not None
    if isinstance(listener.first, FastPath):
        return all(not each._transport.is_reading() for each in listener.first.connections)
    return all(each._buffer_paused for each in listener.aiohttp_server.connections)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)


async def send(sock: socket.socket, octets: bytes) -> None:
    """Send all, which does not end if the server stops to read before it has all, and the system takes no more."""
    if isinstance(sock, ssl.SSLSocket):  # what is sent is small
        await asyncio.to_thread(sock.sendall, octets)
    else:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(sock, octets)


def with_paused_connection(
    with_kernel: WithKernel,
    sent: str,
    test: Callable[[HttpServer, socket.socket, Kernel], Awaitable[None]],
    *,
    certificates: Certificates | None = None,
    new_loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
) -> None:
    """Run `test` with the socket of a client whose connection the server has paused."""
    octets, fast_path, request_count = SENT[sent]
    options = HttpOptions(tls=None if certificates is None else certificates.options())

    async def run(kernel: Kernel) -> None:
        servers: list[HttpServer] = []

        def make(sock: Any) -> HttpServer:
            servers.append(HttpServer(kernel, sock, options, fast_path=fast_path))
            return servers[0]

        async with listening(make) as port:
            sock = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
            if certificates is not None:
                context = certificates.client_context()
                sock = await asyncio.to_thread(context.wrap_socket, sock, server_hostname="127.0.0.1")
            with sock:
                sending = asyncio.ensure_future(send(sock, octets))
                model = kernel.resolve("stuck")
                await until(lambda: model.root_count == request_count and is_paused(servers[0]))
                sending.cancel()
                await asyncio.wait([sending])
                await test(servers[0], sock, kernel)

    with_kernel(run, new_loop)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("leave", [end, reset, end_sending])
def test_requests_of_a_client_that_has_gone_are_cancelled(
    with_kernel: WithKernel,
    sent: str,
    leave: Callable[[socket.socket], None],
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test(server: HttpServer, sock: socket.socket, kernel: Kernel) -> None:
        model = kernel.resolve("stuck")
        leave(sock)
        while model.root_count:
            look(server)
            await asyncio.sleep(0)
        assert model.statistics.failures["CANCELED"] == SENT[sent][2]

    with_paused_connection(with_kernel, sent, test, new_loop=new_loop)


def test_requests_of_a_client_that_has_gone_are_cancelled_under_tls(
    with_kernel: WithKernel, certificates: Certificates
) -> None:
    async def test(server: HttpServer, sock: socket.socket, kernel: Kernel) -> None:
        assert isinstance(sock, ssl.SSLSocket)
        end_sending(sock)  # as a program does that is killed: without a message of TLS
        while kernel.resolve("stuck").root_count:
            look(server)
            await asyncio.sleep(0)

    sent = "requests of the fast path"
    with_paused_connection(with_kernel, sent, test, certificates=certificates)


@pytest.mark.parametrize("sent", SENT)
def test_requests_of_a_client_that_waits_go_on(with_kernel: WithKernel, sent: str) -> None:
    async def test(server: HttpServer, sock: socket.socket, kernel: Kernel) -> None:
        for _ in range(3):
            look(server)
            await asyncio.sleep(0)
        assert kernel.resolve("stuck").root_count == SENT[sent][2]

    with_paused_connection(with_kernel, sent, test)
