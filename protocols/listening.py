"""How a front door listens on its bound socket: one backlog, one limit for TLS handshakes, one form of addresses."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

#: How many connections the operating system keeps until the server accepts them.
BACKLOG = 1024

#: How long a client may take for the handshake of TLS, in seconds.
TLS_HANDSHAKE_TIMEOUT_S = 10.0


async def listen(
    sock: socket.socket,
    make_protocol: Callable[[], asyncio.BaseProtocol],
    tls: ssl.SSLContext | None,
    *,
    tls_shutdown_timeout_s: float | None = None,
) -> asyncio.Server:
    """Accept connections on `sock`, which the returned server owns; with `tls` they are encrypted.

    `tls_shutdown_timeout_s` is how long a client may take to end TLS; None is asyncio's default.
    """
    return await asyncio.get_running_loop().create_server(
        make_protocol,
        sock=sock,
        backlog=BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_TIMEOUT_S,
        ssl_shutdown_timeout=None if tls is None else tls_shutdown_timeout_s,
    )


def machine_names() -> frozenset[str]:
    """Return the names of this machine in lower case: as it was configured, and without its domain."""
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0]})


def listening_address(sock: socket.socket) -> str:
    """Return where `sock` listens: `0.0.0.0:8001`, `[::]:8001`, or the path of a Unix socket."""
    name = sock.getsockname()
    if not isinstance(name, tuple):
        return str(name)
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def find_vanished_peers(transport: asyncio.BaseTransport) -> None:
    """Let the operating system close an idle connection whose peer does not exist any more (TCP keepalive)."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def send_small_writes_at_once(transport: asyncio.BaseTransport) -> None:
    """Turn off Nagle's algorithm, which keeps a small response back until the one before is acknowledged."""
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
