"""Certificates that are renewed while the server runs, and that expire."""

from __future__ import annotations

import asyncio
import datetime
import logging
import shutil
import ssl
import time
from typing import TYPE_CHECKING

import pytest
import trustme

from kernel.options import GrpcOptions, HttpOptions, MetricsOptions, TlsOptions
from protocols import tls as certificates_module
from protocols.grpc.server import GrpcServer
from protocols.http.metrics.server_families import ServerMetrics
from protocols.http.server import HttpServer
from protocols.tls import WARN_EVERY_S, Certificates, expiry_s
from tests.protocols.front_door_lab import FrontDoorLab, listening

if TYPE_CHECKING:
    from pathlib import Path

    from protocols.frontend import FrontDoor

DAY_S = 86400.0


class Files:
    """The files of a front door, which the test renews."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.options = TlsOptions(folder / "server.pem", folder / "key.pem", folder / "authorities.pem", mutual=True)
        self.authority.cert_pem.write_to_path(folder / "authorities.pem")
        self.renew()

    def renew(self, expires: float | None = None, *, key: bool = True) -> None:
        """Write a new certificate, which expires in `expires` seconds, and its key."""
        at = None if expires is None else datetime.datetime.fromtimestamp(time.time() + expires, datetime.UTC)
        issued = self.authority.issue_cert("127.0.0.1", not_after=at)
        issued.cert_chain_pems[0].write_to_path(self.options.certificate)
        if key:
            issued.private_key_pem.write_to_path(self.options.key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def shown_to(client_authority: trustme.CA, certificates: Certificates, *, own_authority: trustme.CA) -> bytes:
    """Return the certificate that a client gets, who trusts `client_authority` and has one of `own_authority`."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    client_authority.configure_trust(context)
    own_authority.issue_cert("client@example.org").configure_cert(context)
    client = context.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    server = certificates.context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    server.do_handshake()
    found = client.getpeercert(binary_form=True)
    assert found is not None
    return found


def on_disk(files: Files) -> bytes:
    return ssl.PEM_cert_to_DER_cert(files.options.certificate.read_text())


def test_new_connections_get_a_renewed_certificate(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    certificates = Certificates("HTTP", files.options)
    first = on_disk(files)
    assert shown_to(files.authority, certificates, own_authority=files.authority) == first
    files.renew()
    assert shown_to(files.authority, certificates, own_authority=files.authority) == first
    certificates.look(time.time())
    assert shown_to(files.authority, certificates, own_authority=files.authority) == on_disk(files) != first
    (line,) = caplog.messages
    assert line.startswith(f"HTTP uses the new certificate '{files.options.certificate}', which expires at ")
    certificates.look(time.time())
    assert len(caplog.messages) == 1


def test_clients_are_checked_by_the_new_authorities_alone(files: Files) -> None:
    certificates = Certificates("HTTP", files.options)
    other = trustme.CA()
    assert files.options.client_ca is not None
    other.cert_pem.write_to_path(files.options.client_ca)
    certificates.look(time.time())
    shown_to(files.authority, certificates, own_authority=other)
    with pytest.raises(ssl.SSLError):
        shown_to(files.authority, certificates, own_authority=files.authority)


def test_wrong_files_change_nothing_and_are_reported_once(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    certificates = Certificates("gRPC", files.options)
    first = on_disk(files)
    files.renew(key=False)
    certificates.look(time.time())
    assert caplog.messages == [], "the key may come a moment later"
    certificates.look(time.time())
    certificates.look(time.time())
    assert caplog.messages == [
        f"gRPC keeps the certificate that it has: TLS server certificate '{files.options.certificate}' with key "
        f"'{files.options.key}' cannot be used: the key does not belong to the certificate"
    ]
    assert shown_to(files.authority, certificates, own_authority=files.authority) == first
    files.renew()
    certificates.look(time.time())
    assert shown_to(files.authority, certificates, own_authority=files.authority) == on_disk(files)


def test_a_certificate_that_is_away_for_a_moment_is_used_when_it_is_back(files: Files, tmp_path: Path) -> None:
    certificates = Certificates("HTTP", files.options)
    shutil.move(files.options.certificate, tmp_path / "away")
    certificates.look(time.time())
    files.renew()
    certificates.look(time.time())
    assert shown_to(files.authority, certificates, own_authority=files.authority) == on_disk(files)


def test_each_day_a_certificate_is_warned_of_that_expires_soon(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.renew(10 * DAY_S)
    certificates = Certificates("HTTP", files.options)
    now_s = time.time()
    for seconds in (0.0, 10.0, WARN_EVERY_S - 1, WARN_EVERY_S, 11 * DAY_S):
        certificates.look(now_s + seconds)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    path = files.options.certificate
    assert caplog.messages[0].startswith(f"the certificate '{path}' of HTTP expires at 20")
    assert caplog.messages[2].startswith(f"the certificate '{path}' of HTTP has expired at 20")
    assert caplog.messages[2].endswith(" UTC: clients refuse it")


def test_nothing_is_said_of_a_certificate_that_lasts(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    files.renew(100 * DAY_S)
    Certificates("HTTP", files.options).look(time.time())
    assert caplog.messages == []


def test_front_doors_use_renewed_certificates_and_the_metrics_say_when_they_expire(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates_module, "LOOK_S", 0.01)
    tls = TlsOptions(files.options.certificate, files.options.key)
    lab = FrontDoorLab()

    def part(door: FrontDoor) -> FrontDoor:
        lab.kernel.server_parts.append(door)
        return door

    async def shown(ports: tuple[int, int]) -> set[bytes]:
        found = set()
        for port in ports:
            pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
            found.add(ssl.PEM_cert_to_DER_cert(pem))
        return found

    async def main() -> None:
        async with (
            listening(lambda sock: part(HttpServer(lab.kernel, sock, HttpOptions(tls=tls)))) as http_port,
            listening(lambda sock: part(GrpcServer(lab.kernel, sock, GrpcOptions(tls=tls)))) as grpc_port,
        ):
            ports = (http_port, grpc_port)
            assert await shown(ports) == {on_disk(files)}
            files.renew(100 * DAY_S)
            for _ in range(1000):  # each takes milliseconds
                if await shown(ports) == {on_disk(files)}:
                    break
            assert await shown(ports) == {on_disk(files)}

    asyncio.run(main())
    page = ServerMetrics(lab.kernel, MetricsOptions(), 0).render(0)
    expires_s = expiry_s(files.options.certificate.read_bytes())
    for protocol in ("http", "grpc"):
        assert f'naiad_server_certificate_expiry_timestamp_seconds{{protocol="{protocol}"}} {expires_s:.0f}' in page


@pytest.mark.parametrize("year", [2030, 2049, 2050, 2300])
def test_the_expiry_is_read_as_a_peer_would(files: Files, year: int) -> None:
    wanted = datetime.datetime(year, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    files.renew(wanted.timestamp() - time.time())
    found = expiry_s(files.options.certificate.read_bytes())
    assert found is not None
    assert abs(found - wanted.timestamp()) <= 1


@pytest.mark.parametrize("cut", [0, 1, 2, 10, 60, 200])
def test_a_file_that_is_cut_has_no_expiry(files: Files, cut: int) -> None:
    whole = on_disk(files)
    assert expiry_s(ssl.DER_cert_to_PEM_cert(whole[:cut]).encode()) is None
    assert expiry_s(b"text") is None
