"""Who a client is: a user of this machine, or an address."""

from __future__ import annotations

import errno
import os
import socket
from typing import TYPE_CHECKING, Any, cast

import pytest

from kernel.errors import NoDescriptorLeft, RequestCancelled
from protocols.access import peer_identity as module
from protocols.access.peer_identity import LOOPBACK, Peer, peer_identity

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

USER = f"user {os.getuid()}"


class FakeTransport:
    def __init__(self, peer: object, sock: object = None) -> None:
        self.asked = 0
        self._values = {"peername": peer, "socket": sock}

    def get_extra_info(self, name: str) -> object:
        self.asked += 1
        return self._values[name]


def transport(peer: object, sock: object = None) -> asyncio.BaseTransport:
    return cast("asyncio.BaseTransport", FakeTransport(peer, sock))


@pytest.fixture(params=["IPv4", "IPv6", "IPv4 written as IPv6"])
def both_ends(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The server's and the client's end of a connection over loopback from this process."""
    family = socket.AF_INET if request.param == "IPv4" else socket.AF_INET6
    both = request.param == "IPv4 written as IPv6"
    try:
        listening = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
    except OSError:
        pytest.skip("this machine has no IPv6")
    client = "::1" if request.param == "IPv6" else "127.0.0.1"
    with listening, socket.create_connection((client, listening.getsockname()[1])) as connecting:
        accepted, _ = listening.accept()
        with accepted:
            yield accepted, connecting


@pytest.fixture
def connection(both_ends: tuple[socket.socket, socket.socket]) -> socket.socket:
    """The server's end of a connection whose client stays."""
    return both_ends[0]


def test_a_client_over_loopback_is_the_user_who_has_connected(connection: socket.socket) -> None:
    assert peer_identity(transport(connection.getpeername(), connection)) == USER


def test_a_client_over_loopback_whose_user_is_not_known_is_one_of_all(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, (host, port, *_) = connection.family, connection.getpeername()
    free = 1 if port != 1 else 2  # no client has this port
    assert module._user_of_tcp(family, (host, free), connection.getsockname()) is None

    def without_netlink(*arguments: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("protocols.access.peer_identity.socket.socket", without_netlink)
    assert peer_identity(transport(connection.getpeername(), connection)) == LOOPBACK


def test_a_client_that_has_closed_its_socket_is_nobody(both_ends: tuple[socket.socket, socket.socket]) -> None:
    """For such a socket the system says user 0."""
    ours, theirs = both_ends
    theirs.sendall(b"request")
    peer = ours.getpeername()
    theirs.shutdown(socket.SHUT_WR)
    assert ours.recv(100) == b"request"
    assert peer_identity(transport(peer, ours)) == USER, "it may wait for the response"
    theirs.close()
    client = Peer(transport(peer, ours))
    for _ in range(2):
        with pytest.raises(RequestCancelled, match="^the client has closed the connection$"):
            _ = client.identity


def test_without_a_descriptor_a_client_is_not_taken_for_another_one(
    connection: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_descriptor(*arguments: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    client = Peer(transport(connection.getpeername(), connection))
    with monkeypatch.context() as patch:
        patch.setattr("protocols.access.peer_identity.socket.socket", without_descriptor)
        with pytest.raises(NoDescriptorLeft):
            _ = client.identity
    assert client.identity == USER


def test_a_client_of_a_unix_socket_is_the_user_who_has_connected() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_identity(transport("", ours)) == USER


@pytest.mark.parametrize(
    ("peer", "identity"),
    [
        (("192.0.2.1", 4000), "192.0.2.1"),
        (("::ffff:192.0.2.1", 4000, 0, 0), "192.0.2.1"),
        (("2001:db8::1", 4000, 0, 0), "2001:db8::1"),
        (("fe80::1%eth0", 4000, 0, 2), "fe80::1"),
        (("nonsense", 1), "nonsense"),
        (None, "unknown"),
    ],
)
def test_a_client_of_another_machine_is_its_address(peer: object, identity: str) -> None:
    assert peer_identity(transport(peer)) == identity


def test_the_client_of_a_connection_is_found_out_once() -> None:
    fake = FakeTransport(("192.0.2.1", 4000))
    peer = Peer(cast("asyncio.BaseTransport", fake))
    assert fake.asked == 0
    assert [peer.identity, peer.identity] == ["192.0.2.1"] * 2
    assert fake.asked == 1


def test_the_client_of_a_lost_connection_is_not_known() -> None:
    with pytest.raises(RequestCancelled):
        _ = Peer(None).identity
