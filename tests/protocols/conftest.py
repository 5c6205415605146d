"""Certificates for tests of front doors that encrypt."""

from __future__ import annotations

import pytest
import trustme

from tests.protocols.certificates import Certificates


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
