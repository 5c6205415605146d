"""Certificates for tests of front doors that encrypt."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import msgspec
import pytest
import trustme

from kernel.options import TlsOptions

if TYPE_CHECKING:
    from pathlib import Path


class Certificates(msgspec.Struct, frozen=True):
    """PEM files of a server at 127.0.0.1, of a client, and of the authority that signed both."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path

    def options(self, *, mutual: bool = False) -> TlsOptions:
        """Return the options of a front door."""
        return TlsOptions(self.server, self.server_key, self.authority if mutual else None, mutual)

    def client_context(self, *, with_certificate: bool = False) -> ssl.SSLContext:
        """Return a context that trusts the server, and shows a certificate if it is to."""
        context = ssl.create_default_context(cafile=str(self.authority))
        if with_certificate:
            context.load_cert_chain(self.client, self.client_key)
        return context


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    found = Certificates(*(folder / f"{name}.pem" for name in Certificates.__struct_fields__))
    authority = trustme.CA()
    authority.cert_pem.write_to_path(found.authority)
    for certificate, chain, key in (
        (authority.issue_cert("127.0.0.1", "localhost"), found.server, found.server_key),
        (authority.issue_cert("client@example.org"), found.client, found.client_key),
    ):
        chain.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(key)
    return found
