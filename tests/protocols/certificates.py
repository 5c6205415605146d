"""The PEM files that tests of encrypted front doors use."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

import msgspec

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
