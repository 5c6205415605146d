"""aiohttp is imported without the certificates of authorities; its client finds them when it needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Begins in a new interpreter: here aiohttp has been imported long ago.
PROGRAM = """
import ssl
import protocols.http.light_aiohttp as light
import aiohttp.connector as connector

contexts = (connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED)
assert [type(each) for each in contexts] == [light.LateContext] * 2, contexts
assert "set_default_verify_paths" not in vars(ssl.SSLContext)
assert type(ssl.create_default_context()) is ssl.SSLContext
context = contexts[0]
assert isinstance(context, ssl.SSLContext) and context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
{use}
assert type(context) is ssl.SSLContext
assert context.cert_store_stats() == ssl.create_default_context().cert_store_stats()
"""

USES = {
    "wrap_bio": "context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname='localhost')",
    "wrap_socket": (
        "import socket\n"
        "with socket.socket() as plain:\n"
        "    context.wrap_socket(plain, server_hostname='localhost', do_handshake_on_connect=False).close()"
    ),
    "get_ca_certs": "context.get_ca_certs()",
    "cert_store_stats": "context.cert_store_stats()",
}


@pytest.mark.parametrize("use", USES)
def test_certificates_are_loaded_when_a_context_is_first_used(use: str) -> None:
    program = PROGRAM.format(use=USES[use])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
