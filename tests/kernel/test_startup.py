"""Sockets that the server binds at start."""

from __future__ import annotations

import socket

import pytest

from kernel.options import ListenAddress
from kernel.startup import CannotListen, bind


def test_port_zero_binds_a_free_port() -> None:
    with bind("HTTP", ListenAddress(True, "127.0.0.1", 0)) as sock:
        assert sock.getsockname()[1] != 0
        assert sock.getblocking() is False


def test_the_error_of_a_port_in_use_names_the_flag_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen) as caught:
            bind("GRPC", ListenAddress(True, "127.0.0.1", port))
    assert str(caught.value) == (
        f"failed to start GRPC service: Unavailable - Socket '127.0.0.1:{port}' already in use. "
        "Choose another port with --grpc-port"
    )


def test_servers_with_reuse_port_share_a_port() -> None:
    with bind("HTTP", ListenAddress(True, "127.0.0.1", 0, reuse_port=True)) as first:
        first.listen()
        port = first.getsockname()[1]
        with bind("HTTP", ListenAddress(True, "127.0.0.1", port, reuse_port=True)) as second:
            second.listen()
        with pytest.raises(CannotListen, match="already in use"):
            bind("HTTP", ListenAddress(True, "127.0.0.1", port))


@pytest.mark.parametrize("address", ["a" * 70, "203.0.113.1"])
def test_an_address_of_another_machine_is_an_error(address: str) -> None:
    with pytest.raises(CannotListen, match="failed to start Metrics service"):
        bind("Metrics", ListenAddress(True, address, 0))
