"""Which peers are on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, cast

import pytest
import uvloop

from protocols.listening import ACCEPTED_AT_ONCE, is_local, listen, listening_address, machine_names

if TYPE_CHECKING:
    from collections.abc import Callable
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
            sock = transport.get_extra_info("socket")
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


class Speaker(asyncio.Protocol):
    """Sends a word."""

    def __init__(self, word: bytes) -> None:
        self._word = word

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._word)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_connections_with_the_last_descriptors_are_refused_and_only_some_learn_why(
    new_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserved = True
    monkeypatch.setattr("protocols.listening.is_reserved", lambda fd: reserved)
    monkeypatch.setattr("protocols.listening.MOST_REFUSALS", 3)
    monkeypatch.setattr("protocols.listening.REFUSAL_S", 1.0)

    async def word(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        found = b""
        with contextlib.suppress(ConnectionResetError):
            found = await reader.read(7)
        writer.close()
        return found

    async def main() -> None:
        nonlocal reserved
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        async with await listen(sock, lambda: Speaker(b"welcome"), None, make_refusal=lambda: Speaker(b"refused")):
            words = await asyncio.gather(*(word(port) for _ in range(5)))
            assert sorted(words) == [b"", b"", b"refused", b"refused", b"refused"]
            while (found := await word(port)) != b"refused":  # until one of them has ended
                assert found == b""
            reserved = False
            assert await word(port) == b"welcome"

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    [line] = [record for record in caplog.records if "connections are refused" in record.message]
    assert line.levelname == "WARNING"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_hundreds_of_connections_that_come_at_once_are_accepted_some_in_each_iteration(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    opened: list[asyncio.BaseTransport] = []

    class Counted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            opened.append(transport)

    async def main() -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.bind(("127.0.0.1", 0))
        async with await listen(sock, Counted, None, make_refusal=asyncio.Protocol):
            with contextlib.ExitStack() as clients:
                for _ in range(10 * ACCEPTED_AT_ONCE):  # all are in the queue of the operating system then
                    clients.enter_context(socket.create_connection(sock.getsockname(), timeout=60))
                while len(opened) < 10 * ACCEPTED_AT_ONCE:
                    before = len(opened)
                    await asyncio.sleep(0)
                    assert len(opened) - before <= ACCEPTED_AT_ONCE + 1
                for transport in opened:
                    cast("asyncio.Transport", transport).abort()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_the_machine_has_a_name_with_and_without_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU7.corp.example")
    assert machine_names() == {"gpu7.corp.example", "gpu7"}


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
