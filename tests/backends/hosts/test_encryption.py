"""TLS between servers and agents: who is refused and why, renewed certificates, and data that ends or is not taken."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import os
import socket
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trustme

from backends.hosts.encryption import Encryption, Secured
from backends.hosts.messages import NotAdmitted, Purpose, prove
from kernel.errors import BadOption
from kernel.options import TlsOptions
from tests.backends.hosts.agent_lab import agent_running, launcher_to
from tests.backends.hosts.played_ray import played_ray
from tests.backends.launch.started_workers import end_of, hello_of, identity_model, run, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kernel.repository.worker_needs import WorkerNeeds

LARGE = 5 << 20


class Authority:
    """An authority, and the files of those for whom it has signed."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._authority.cert_pem.write_to_path(folder / "authority.pem")

    def signed(self, who: str, name: str = "127.0.0.1", valid_s: float | None = None) -> TlsOptions:
        """Return the files of a new certificate, which replace earlier ones of the same holder."""
        end = None if valid_s is None else datetime.datetime.fromtimestamp(time.time() + valid_s, datetime.UTC)
        issued = self._authority.issue_cert(name, not_after=end)
        found = TlsOptions(
            self._folder / f"{who}.pem", self._folder / f"{who}.key", self._folder / "authority.pem", True
        )
        issued.private_key_pem.write_to_path(found.key)
        issued.cert_chain_pems[0].write_to_path(found.certificate)
        return found


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "certificates")


@pytest.fixture
def needs(tmp_path: Path) -> WorkerNeeds:
    return identity_model(tmp_path / "models", os.urandom(LARGE))


def ends(agent: TlsOptions, server: TlsOptions) -> tuple[Encryption, Encryption]:
    return Encryption(agent, listens=True), Encryption(server, listens=False)


@contextlib.asynccontextmanager
async def connected(agent: Encryption, server: Encryption) -> AsyncIterator[tuple[Secured, Secured]]:
    """Both ends of an encrypted connection, with sockets that do not block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        outgoing = socket.create_connection(listener.getsockname())
        incoming, _ = listener.accept()
    found = await asyncio.gather(agent.secure(incoming), server.secure(outgoing, "127.0.0.1"))
    for each in found:
        each.socket.setblocking(False)
    try:
        yield found
    finally:
        for each in found:
            each.socket.close()
        agent.close()
        server.close()


def test_workers_are_started_over_encrypted_connections(
    tmp_path: Path, needs: WorkerNeeds, authority: Authority
) -> None:
    async def main() -> None:
        agent, server = ends(authority.signed("agent"), authority.signed("server", "server.example"))
        async with (
            agent_running(tmp_path / "c", encryption=agent) as (_, address),
            launcher_to(address, encryption=server) as launcher,
        ):
            worker = await launcher.launch("m_0", needs=needs)
            await hello_of(worker)
            copy, original = Path(worker.folder(needs.folder), "1", "weights"), Path(needs.folder, "1", "weights")
            assert copy.read_bytes() == original.read_bytes()
            worker.kill()
            assert (await end_of(worker)).startswith("killed by signal 9")
            worker.socket.close()

    run(main())


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("agent expired", "the certificate of the agent is refused: certificate has expired"),
        ("agent of another authority", "the certificate of the agent is refused: unable to get local issuer"),
        ("agent with another name", "the certificate of the agent is refused: IP address mismatch"),
        ("server expired", "refuses our certificate"),
        ("server of another authority", "refuses our certificate"),
        ("agent without TLS", "the agent does not use TLS (--cert-file of naiad agent)"),
    ],
)
def test_an_agent_that_does_not_agree_is_waited_for_with_the_reason(
    case: str,
    text: str,
    tmp_path: Path,
    needs: WorkerNeeds,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    other = Authority(tmp_path / "other")

    def trusting(files: TlsOptions) -> TlsOptions:
        """The certificate of another authority, with the right one for the peer."""
        return TlsOptions(files.certificate, files.key, tmp_path / "certificates" / "authority.pem", True)

    async def main() -> None:
        agent, server = authority.signed("agent"), authority.signed("server")
        if case == "agent expired":
            agent = authority.signed("agent", valid_s=-60)
        elif case == "agent of another authority":
            agent = trusting(other.signed("agent"))
        elif case == "agent with another name":
            agent = authority.signed("agent", "10.0.0.1")
        elif case == "server expired":
            server = authority.signed("server", valid_s=-60)
        elif case == "server of another authority":
            server = trusting(other.signed("server"))
        listening: Encryption | None
        listening, calling = ends(agent, server)
        if case == "agent without TLS":
            listening = None
        async with (
            agent_running(tmp_path / "c", encryption=listening) as (
                far,
                address,
            ),
            launcher_to(address, encryption=calling) as launcher,
        ):
            texts: list[str] = []
            waiting = asyncio.create_task(launcher.launch("m_0", needs=needs, pending=texts.append))
            await until(lambda: text in str(texts))
            if case.startswith("server"):
                reason = "certificate has expired" if "expired" in case else "unable to get local issuer certificate"
                assert f"is refused: the certificate of the server is refused: {reason}" in caplog.text
            assert not far.sessions
            waiting.cancel()
            await asyncio.wait([waiting])

    run(main())


def test_a_server_without_a_certificate_is_refused(authority: Authority) -> None:
    async def main() -> None:
        agent = Encryption(authority.signed("agent"), listens=True)
        context = ssl.create_default_context(cafile=str(authority.signed("agent").client_ca))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            outgoing = socket.create_connection(listener.getsockname())
            incoming, _ = listener.accept()

        def talk() -> bytes:
            with (
                contextlib.suppress(OSError),
                outgoing,
                context.wrap_socket(outgoing, server_hostname="127.0.0.1") as secured,
            ):
                return secured.recv(1)
            return b""

        talking = asyncio.create_task(asyncio.to_thread(talk))
        with pytest.raises(NotAdmitted, match="the server has shown no certificate"):
            await agent.secure(incoming)
        assert await talking == b""

    run(main())


def test_an_agent_that_waits_for_tls_is_told_from_one_that_does_not_respond() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(NotAdmitted, match=r"has said nothing .timed out.: .*--agent-cert-file"):
        prove(ours, b"token", Purpose(bytes(16)), 0.01)


def test_a_peer_that_sends_a_byte_at_a_time_is_not_waited_for_longer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        theirs.sendall(b"naiad-agent-1\n" + bytes(31))  # all but the last byte
        with pytest.raises(TimeoutError):
            prove(ours, b"token", Purpose(bytes(16)), 0.01)


def test_new_connections_use_a_renewed_certificate_and_wrong_files_change_nothing(authority: Authority) -> None:
    async def main() -> None:
        files = authority.signed("agent", "10.0.0.1")
        agent, server = ends(files, authority.signed("server"))
        with pytest.raises(NotAdmitted, match="IP address mismatch"):
            await both(agent, server)
        authority.signed("agent")
        await both(agent, server)
        files.key.write_text("no key")
        await both(agent, server)

    async def both(agent: Encryption, server: Encryption) -> None:
        async with connected(agent, server):
            pass

    run(main())


def test_large_messages_arrive_whole_in_both_directions_and_end_with_the_connection(authority: Authority) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with connected(*ends(authority.signed("agent"), authority.signed("server"))) as (agent, server):
            data = os.urandom(LARGE)

            async def send(end: Secured) -> None:
                await loop.sock_sendall(end.socket, data)

            async def receive(end: Secured, byte_size: int) -> bytes:
                received = bytearray()
                while len(received) < byte_size and (portion := await loop.sock_recv(end.socket, 1 << 20)):
                    received += portion
                return hashlib.sha256(received).digest()

            found = await asyncio.gather(send(agent), send(server), receive(agent, LARGE), receive(server, LARGE))
            assert set(found[2:]) == {hashlib.sha256(data).digest()}
            await send(agent)
            agent.socket.close()
            assert await receive(server, LARGE + 1) == hashlib.sha256(data).digest()

    run(main())


def test_who_does_not_read_is_not_sent_more(authority: Authority) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with connected(*ends(authority.signed("agent"), authority.signed("server"))) as (agent, server):
            for each in (agent.socket, server.socket):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            sent = 0

            async def send() -> None:
                nonlocal sent
                while True:
                    await loop.sock_sendall(agent.socket, bytes(1 << 16))
                    sent += 1 << 16

            sending = asyncio.create_task(send())
            before = -1
            while before != sent:  # it goes on until all is full
                before = sent
                for _ in range(200):
                    await asyncio.sleep(0)
            assert 0 < sent < 64 << 20
            sending.cancel()
            await asyncio.wait([sending])

    run(main())


def test_agents_that_ray_places_have_the_files_of_their_hosts(
    tmp_path: Path, needs: WorkerNeeds, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    async def main() -> None:
        async with played_ray(tls=authority.signed("host")) as (launcher, cluster, _):
            worker = await launcher.launch("m_0", needs=needs)
            await hello_of(worker)
            (actor,) = cluster.actors.values()
            assert actor.options["certificate"][0] == str(tmp_path / "certificates" / "host.pem")
            worker.kill()
            await end_of(worker)
            worker.socket.close()

    run(main())


def test_wrong_files_are_refused_at_the_start(authority: Authority, tmp_path: Path) -> None:
    files = authority.signed("agent")
    files.certificate.write_text("no certificate")
    with pytest.raises(BadOption, match=r"TLS server certificate '.*agent.pem' is not PEM"):
        Encryption(files, listens=True)
    missing = TlsOptions(tmp_path / "none.pem", files.key, files.client_ca, True)
    with pytest.raises(BadOption, match=r"TLS client certificate '.*none.pem' cannot be read: No such file"):
        Encryption(missing, listens=False)
