from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from protocols.listening import find_vanished_peers, listen, listening_address, send_small_writes_at_once

if TYPE_CHECKING:
    from pathlib import Path


def test_addresses_are_written_as_clients_write_them(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert listening_address(sock) == f"127.0.0.1:{sock.getsockname()[1]}"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "socket"))
        assert listening_address(sock) == str(tmp_path / "socket")


def test_addresses_of_ip_version_6_are_in_brackets() -> None:
    class Bound:
        def getsockname(self) -> tuple[str, int, int, int]:
            return ("::", 8001, 0, 0)

    assert listening_address(Bound()) == "[::]:8001"  # type: ignore[arg-type]  # the part of a socket that is read


def test_a_connection_is_accepted_sends_small_writes_at_once_and_finds_vanished_peers() -> None:
    class Greeter(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            send_small_writes_at_once(transport)
            sock = transport.get_extra_info("socket")
            find_vanished_peers(transport)
            no_delay = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            keeps_alive = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert isinstance(transport, asyncio.Transport)
            transport.write(b"at once" if no_delay and keeps_alive else b"later")
            transport.close()

    async def main() -> bytes:
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        async with await listen(sock, Greeter, None, make_refusal=asyncio.Protocol):
            reader, writer = await asyncio.open_connection("127.0.0.1", sock.getsockname()[1])
            greeting = await reader.read()
            writer.close()
            return greeting

    assert asyncio.run(main()) == b"at once"
