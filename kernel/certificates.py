"""Makes TLS contexts (TLS 1.2 and newer) from certificate files. On request, peers must have a certificate.

A mistake in the files is an error of one line.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from kernel.errors import BadOption
from kernel.regular_files import read_regular

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernel.options import TlsOptions

#: The most bytes of a file that are looked at.
MAX_BYTE_SIZE = 16 << 20

_PEM_BEGIN = b"-----BEGIN "

#: OpenSSL's names of mistakes, and what they mean for the operator.
_PROBLEMS = {
    "KEY_VALUES_MISMATCH": "the key does not belong to the certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "it holds no certificate",
    "CA_MD_TOO_WEAK": "its signature is too weak",
    "EE_KEY_TOO_SMALL": "its key is too short",
}


def server_context(options: TlsOptions, application_protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return a context for connections that clients open. Reads the files; raises `BadOption`.

    `application_protocols` are offered to clients with ALPN, the preferred one first.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A client could make the server negotiate again and again on one connection.
    context.options |= ssl.OP_NO_RENEGOTIATION
    _load_certificate(context, options, "server")
    if options.mutual:
        _require_certificates(context, options.client_ca)
    if application_protocols:
        context.set_alpn_protocols(list(application_protocols))
    return context


def client_context(options: TlsOptions) -> ssl.SSLContext:
    """Return a context for connections to servers with certificates of `options.client_ca`. Names are checked.

    It shows our own certificate. Reads the files; raises `BadOption`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks names
    _load_certificate(context, options, "client")
    _require_certificates(context, options.client_ca)
    return context


def _load_certificate(context: ssl.SSLContext, options: TlsOptions, side: str) -> None:
    _check_pem(f"{side} certificate", options.certificate)
    _check_pem(f"{side} key", options.key)
    try:
        context.load_cert_chain(options.certificate, options.key, password=_no_passphrase)
    except _Encrypted:
        raise BadOption(f"TLS {side} key '{options.key}' is encrypted: give one without a passphrase") from None
    except (ssl.SSLError, OSError) as error:
        raise BadOption(
            f"TLS {side} certificate '{options.certificate}' with key '{options.key}' cannot be used: {_explain(error)}"
        ) from None


def _require_certificates(context: ssl.SSLContext, authorities: Path | None) -> None:
    if authorities is None:
        raise BadOption("mutual TLS needs the certificates of those who sign for the peers (root certificate)")
    _check_pem("root certificate", authorities)
    try:
        context.load_verify_locations(authorities)
    except (ssl.SSLError, OSError) as error:
        raise BadOption(f"TLS root certificate '{authorities}' cannot be used: {_explain(error)}") from None
    context.verify_mode = ssl.CERT_REQUIRED


def _check_pem(title: str, path: Path) -> None:
    """Raise `BadOption` for a file that cannot be read, or that is clearly not PEM."""
    try:
        text = read_regular(path, MAX_BYTE_SIZE)
    except OSError as error:
        raise BadOption(f"TLS {title} '{path}' cannot be read: {error.strerror}") from None
    if _PEM_BEGIN not in text:
        raise BadOption(f"TLS {title} '{path}' is not PEM: it has no line that starts with '-----BEGIN '")


class _Encrypted(Exception):
    """A passphrase is asked for."""


def _no_passphrase() -> str:
    # Without this OpenSSL would ask for it on the terminal, and the server would wait.
    raise _Encrypted


def _explain(error: OSError) -> str:
    reason = getattr(error, "reason", None) or ""
    return _PROBLEMS.get(reason, reason.replace("_", " ").lower() or "it is not valid PEM")
