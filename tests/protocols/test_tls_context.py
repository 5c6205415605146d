"""TLS contexts: which clients get a connection, and the errors for mistakes in the files."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization

from kernel.certificates import server_context
from kernel.errors import BadOption
from kernel.options import TlsOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.protocols.certificates import Certificates


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str | None, str | None]:
    """Connect in memory; returns the version and the application protocol. Raises `ssl.SSLError`."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    for end in ends:
        end.do_handshake()
    return ends[1].version(), ends[1].selected_alpn_protocol()


def test_a_client_that_trusts_the_authority_is_connected(certificates: Certificates) -> None:
    context = server_context(certificates.options())
    assert shake_hands(context, certificates.client_context()) == ("TLSv1.3", None)


def test_tls_1_2_is_the_oldest_version(certificates: Certificates) -> None:
    context = server_context(certificates.options())
    client = certificates.client_context()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert shake_hands(context, client)[0] == "TLSv1.2"
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("offered", "wanted", "agreed"), [(["h2"], ["h2"], "h2"), (["http/1.1", "h2"], ["h2", "http/1.1"], "http/1.1")]
)
def test_application_protocols_are_agreed_on(
    certificates: Certificates, offered: Sequence[str], wanted: list[str], agreed: str
) -> None:
    client = certificates.client_context()
    client.set_alpn_protocols(wanted)
    assert shake_hands(server_context(certificates.options(), offered), client)[1] == agreed


def test_mutual_tls_asks_clients_for_a_certificate(certificates: Certificates) -> None:
    context = server_context(certificates.options(mutual=True))
    assert shake_hands(context, certificates.client_context(with_certificate=True))[0] == "TLSv1.3"
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake_hands(context, certificates.client_context())


def test_a_certificate_of_another_authority_is_not_enough(certificates: Certificates, tmp_path: Path) -> None:
    context = server_context(
        TlsOptions(certificates.server, certificates.server_key, client_ca=certificates.server, mutual=True)
    )
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake_hands(context, certificates.client_context(with_certificate=True))


@pytest.mark.parametrize(
    ("field", "title"),
    [("certificate", "server certificate"), ("key", "server key"), ("client_ca", "root certificate")],
)
def test_files_must_be_there_and_be_pem(certificates: Certificates, tmp_path: Path, field: str, title: str) -> None:
    good = certificates.options(mutual=True)
    absent, folder, other = tmp_path / "absent.pem", tmp_path, tmp_path / "other.der"
    other.write_bytes(b"\x30\x82\x01\x00")
    for path, problem in (
        (absent, "cannot be read: No such file or directory"),
        (folder, "cannot be read: Is a directory"),
        (other, "is not PEM: it has no line that starts with '-----BEGIN '"),
    ):
        with pytest.raises(BadOption) as caught:
            server_context(msgspec.structs.replace(good, **{field: path}))
        assert str(caught.value) == f"TLS {title} '{path}' {problem}"


def test_a_key_of_another_certificate_is_refused(certificates: Certificates) -> None:
    with pytest.raises(BadOption, match="cannot be used: the key does not belong to the certificate$"):
        server_context(TlsOptions(certificates.server, certificates.client_key))


def test_a_key_behind_a_passphrase_is_refused_without_asking_for_it(certificates: Certificates, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(certificates.server_key.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(BadOption) as caught:
        server_context(TlsOptions(certificates.server, locked))
    assert str(caught.value) == f"TLS server key '{locked}' is encrypted: give one without a passphrase"


def test_broken_pem_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    with pytest.raises(BadOption, match="cannot be used: "):
        server_context(TlsOptions(broken, certificates.server_key))
    with pytest.raises(BadOption, match=f"^TLS root certificate '{broken}' cannot be used: "):
        server_context(TlsOptions(certificates.server, certificates.server_key, client_ca=broken, mutual=True))


def test_mutual_tls_needs_an_authority(certificates: Certificates) -> None:
    with pytest.raises(BadOption, match="^mutual TLS needs the certificates of those who sign for the peers"):
        server_context(TlsOptions(certificates.server, certificates.server_key, mutual=True))
