"""How a front door listens on its bound socket: one backlog, one limit for TLS handshakes, one form of addresses.

A connection for which there is no file descriptor but those that are kept for workers is refused.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from typing import TYPE_CHECKING, cast

from kernel.machine import is_reserved

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

#: How many connections the operating system keeps until the server accepts them.
BACKLOG = 1024

#: How many of them are accepted in one event-loop iteration; each takes some 20 us. uvloop accepts one of each socket.
ACCEPTED_AT_ONCE = 16

#: How long a client may take for the handshake of TLS, in seconds.
TLS_HANDSHAKE_TIMEOUT_S = 10.0

#: How long a connection that is refused stays open, so that its client can read why, and how many stay open.
REFUSAL_S = 1.0
MOST_REFUSALS = 16

#: The least time between two lines of the log about refused connections.
_LOG_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


async def listen(
    sock: socket.socket,
    make_protocol: Callable[[], asyncio.BaseProtocol],
    tls: ssl.SSLContext | None,
    *,
    make_refusal: Callable[[], asyncio.BaseProtocol],
    tls_shutdown_timeout_s: float | None = None,
) -> asyncio.Server:
    """Accept connections on `sock`, which the returned server owns; with `tls` they are encrypted.

    `make_refusal` makes the protocol of a connection that is refused: it says why, and is closed here. A client may
    take `tls_shutdown_timeout_s` to end TLS; None is asyncio's default.
    """
    _set_options(sock)
    gate = Gate(make_refusal)
    server = await asyncio.get_running_loop().create_server(
        lambda: NewConnection(gate, make_protocol),
        sock=sock,
        backlog=ACCEPTED_AT_ONCE,  # asyncio accepts as many in one iteration
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else TLS_HANDSHAKE_TIMEOUT_S,
        ssl_shutdown_timeout=None if tls is None else tls_shutdown_timeout_s,
    )
    sock.listen(BACKLOG)  # only the operating system keeps as many
    return server


class Gate:
    """Admits the connections of one listening socket, or refuses them."""

    def __init__(self, make_refusal: Callable[[], asyncio.BaseProtocol]) -> None:
        self._make_refusal = make_refusal
        self._refusal_count = 0
        self._next_log_s = 0.0

    def open(self, transport: asyncio.Transport, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        """Give a new connection the protocol of the front door, or one that says why it is refused."""
        sock = transport.get_extra_info("socket")
        if sock is None or not is_reserved(sock.fileno()):
            _connect(make_protocol(), transport)
            return
        loop = asyncio.get_running_loop()
        if (now_s := loop.time()) >= self._next_log_s:
            self._next_log_s = now_s + _LOG_INTERVAL_S
            logger.warning(
                "connections are refused: clients use all file descriptors except those that are reserved for workers; "
                "raise the limit of open files (ulimit -n)"
            )
        if self._refusal_count >= MOST_REFUSALS:
            transport.abort()
            return
        self._refusal_count += 1
        _connect(self._make_refusal(), transport)
        loop.call_later(REFUSAL_S, self._end, transport)

    def _end(self, transport: asyncio.Transport) -> None:
        self._refusal_count -= 1
        transport.abort()


class NewConnection(asyncio.Protocol):
    """A connection before it has its protocol."""

    def __init__(self, gate: Gate, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        self._gate = gate
        self._make_protocol = make_protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._gate.open(cast("asyncio.Transport", transport), self._make_protocol)


class Arrival(asyncio.Protocol):
    """A new connection: a front door in a process of its own gets it if there is one, else this process serves it."""

    def __init__(
        self, give: Callable[[asyncio.Transport, bytes, int], bool], make_local: Callable[[], asyncio.BaseProtocol]
    ) -> None:
        """`give` is that of `protocols.frontend.DoorProcesses`."""
        self._give = give
        self._make_local = make_local

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        given = cast("asyncio.Transport", transport)
        if not self._give(given, b"", 1):
            _connect(self._make_local(), given)


async def adopt(sock: socket.socket, make_protocol: Callable[[], asyncio.BaseProtocol]) -> None:
    """Serve a connection that comes from another process. Its client may have left meanwhile."""
    try:
        await asyncio.get_running_loop().connect_accepted_socket(make_protocol, sock)
    except OSError:
        sock.close()


def _connect(protocol: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
    transport.set_protocol(protocol)
    protocol.connection_made(transport)


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


def local_url(sock: socket.socket, *, tls: bool) -> str:
    """Return the URL by which programs on this machine reach a port of HTTP; for a Unix socket with its path."""
    address = listening_address(sock)
    for wildcard in ("0.0.0.0:", "[::]:", "127.0.0.1:", "[::1]:"):
        if address.startswith(wildcard):
            address = f"localhost:{address.removeprefix(wildcard)}"
    return f"{'https' if tls else 'http'}://{address}"


def _set_options(sock: socket.socket) -> None:
    """Set options of a listening socket that its connections inherit: no system calls for each of them.

    The operating system closes an idle connection whose peer does not exist any more (TCP keepalive). Nagle's
    algorithm, which keeps a small response back until the one before is acknowledged, is off.
    """
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_local(peer: object) -> bool:
    """Whether a peer address (as `transport.get_extra_info('peername')` gives it) is on this machine.

    Loopback addresses and Unix sockets are. An address of an unknown kind is not.
    """
    if isinstance(peer, (str, bytes)):
        return True  # a Unix socket
    if not isinstance(peer, tuple) or not peer:
        return False
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
