"""A certificate for the rows with TLS, made for the run by `openssl`, and the flags of servers that use it."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import msgspec

from bench.triton import NotAvailable

if TYPE_CHECKING:
    from pathlib import Path


class TlsFlags(msgspec.Struct, frozen=True):
    """Flags of a server with TLS: for gRPC, which Triton knows too, and for HTTP, which only ours knows."""

    grpc: tuple[str, ...]
    http: tuple[str, ...]

    @property
    def both(self) -> tuple[str, ...]:
        return self.grpc + self.http


def missing_openssl() -> str:
    """Return why there can be no certificate on this machine, or nothing."""
    return "" if shutil.which("openssl") else "openssl is not installed, which makes the certificate"


def tls_flags(folder: Path) -> TlsFlags:
    """Make a certificate for 127.0.0.1 in `folder` and return the flags. Raises `NotAvailable`."""
    certificate, key = folder / "server.pem", folder / "server.key"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
        "-out", str(certificate),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotAvailable(f"openssl has made no certificate: {done.stderr.strip().splitlines()[-1:]}")
    grpc, http = (
        (f"--{door}-use-ssl=true", f"--{door}-server-cert={certificate}", f"--{door}-server-key={key}")
        for door in ("grpc", "http")
    )
    return TlsFlags(grpc, http)
