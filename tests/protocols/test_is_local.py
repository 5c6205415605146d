"""Which peers are on this machine."""

from __future__ import annotations

import pytest

from protocols.listening import is_local


@pytest.mark.parametrize(
    "peer", [("127.0.0.1", 1), ("127.8.9.1", 1), ("::1", 1, 0, 0), ("::ffff:127.0.0.1", 1, 0, 0), "", "/run/x"]
)
def test_loopback_and_unix_sockets_are_local(peer: object) -> None:
    assert is_local(peer)


@pytest.mark.parametrize(
    "peer", [("10.0.0.1", 1), ("192.168.1.2", 1), ("fe80::1%eth0", 1, 0, 2), ("localhost", 1), None, (), 5]
)
def test_others_and_unknown_kinds_of_addresses_are_not(peer: object) -> None:
    assert not is_local(peer)
