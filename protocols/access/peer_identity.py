"""Who a client is, for the limit and the ownership of shared memory regions: a user of this machine, or an address.

Clients on this machine all have the same address, or can choose any (127.0.0.2 and so on). So they are identified by
the user who has opened the connection. The system knows it for Unix sockets (unix(7), SO_PEERCRED) and for TCP over
loopback (sock_diag(7)).
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import TYPE_CHECKING, Any

from kernel.errors import NoDescriptorLeft, RequestCancelled, lacks_descriptors
from protocols.listening import is_local

if TYPE_CHECKING:
    import asyncio

#: Clients of this machine whose user the system does not say.
LOOPBACK = "loopback"

_CLIENT_GONE = "the client has closed the connection"

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ALL_STATES = 0xFFFFFFFF
#: nlmsghdr, and where in the inet_diag_msg behind it the user id stands, and then the inode (linux/inet_diag.h).
_MESSAGE_HEAD = struct.Struct("=IHHII")
_UID_OFFSET = _MESSAGE_HEAD.size + 4 + 48 + 3 * 4


def peer_identity(transport: asyncio.BaseTransport | None) -> str:
    """Return who the client of a connection is, such as `user 1000` or `192.0.2.1`.

    Asks the system with up to three system calls; call it once for a connection. Raises `ServingError` if the client
    has closed the connection, so that its user is not known any more, or if no file descriptor is left to ask with.
    """
    if transport is None:  # aiohttp forgets that of a lost connection
        raise RequestCancelled(_CLIENT_GONE)
    peer = transport.get_extra_info("peername")
    if not is_local(peer):
        return _address(peer)
    uid = _user_of(transport.get_extra_info("socket"), peer)
    return LOOPBACK if uid is None else f"user {uid}"


class Peer:
    """The client of a connection, determined when it is first needed."""

    __slots__ = ("_identity", "_transport")

    def __init__(self, transport: asyncio.BaseTransport | None) -> None:
        self._transport = transport
        self._identity: str | None = None

    @property
    def identity(self) -> str:
        """See `peer_identity`. Raises `ServingError`."""
        if self._identity is None:
            self._identity = peer_identity(self._transport)
        return self._identity


def _address(peer: object) -> str:
    """Return an address without port and zone, an IPv4 address that is written as IPv6 as IPv4."""
    if not isinstance(peer, tuple) or not peer:
        return "unknown"
    text = str(peer[0]).partition("%")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    return str(getattr(address, "ipv4_mapped", None) or address)


def _user_of(sock: Any, peer: Any) -> int | None:
    """Return the user id of the process at the other end, None if the system does not say. Raises `ServingError`."""
    try:
        if sock.family == socket.AF_UNIX:
            _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            return int(uid)
        return _user_of_tcp(sock.family, peer, sock.getsockname())
    except OSError as error:
        if lacks_descriptors(error):  # must not make a client another one
            raise NoDescriptorLeft from None
        return None  # no netlink in this container, or the connection is lost


def _user_of_tcp(family: int, client: tuple[Any, ...], server: tuple[Any, ...]) -> int | None:
    """Return the user id of the client's socket of a TCP connection within this machine; None if there is none.

    Raises `OSError`, and `RequestCancelled` if the client has closed its socket.
    """
    ends = struct.pack("!HH", client[1], server[1])
    for address in (client[0], server[0]):
        ends += socket.inet_pton(family, address.partition("%")[0]).ljust(16, b"\0")
    request = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
    request += ends + struct.pack("=I", 0) + b"\xff" * 8  # any interface, any cookie
    head = _MESSAGE_HEAD.pack(_MESSAGE_HEAD.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as netlink:
        netlink.setblocking(False)  # the response is there when `send` returns
        netlink.send(head + request)
        response = netlink.recv(4096)
    if _MESSAGE_HEAD.unpack_from(response)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    uid, inode = struct.unpack_from("=II", response, _UID_OFFSET)
    if not inode:  # no process has the socket any more, and the system says 0 in place of the user
        raise RequestCancelled(_CLIENT_GONE)
    return int(uid)
