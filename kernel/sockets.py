"""Sockets of the front doors. The server binds them first, so that a port in use is an error right at the start."""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.options import ListenAddress


class CannotListen(Exception):
    """The server cannot listen on an address. The message is one line."""


def bind(title: str, listener: ListenAddress) -> socket.socket:
    """Return a bound socket that does not listen yet; the caller closes it. Raises `CannotListen`.

    `title` names the front door in messages and, in lower case, in its flags.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listener.address, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a name"
        raise CannotListen(
            f"failed to start {title} service: Unavailable - address '{listener.address}': {reason}. "
            f"Choose another one with --{title.lower()}-address"
        ) from None
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        reason = "already in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise CannotListen(
            f"failed to start {title} service: Unavailable - Socket '{listener.address}:{listener.port}' {reason}. "
            f"Choose another port with --{title.lower()}-port"
        ) from None
    return sock
