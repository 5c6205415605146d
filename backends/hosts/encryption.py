"""TLS between servers and agents: the same authority has signed the certificates of both sides.

Workers, and the server's code for their connections, use plain sockets, and processes pass the descriptors on. So the
encrypted connection stays in the process that opened it. `Encryption.secure` returns one end of a pair of sockets. The
event loop copies between the other end and the encrypted connection, a quarter of a megabyte at a time.

The token is needed as well. The server checks that the certificate has the name by which it reaches the agent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import TYPE_CHECKING, cast

from backends.hosts.messages import PROOF_S, NotAdmitted, SaidNothing
from kernel.certificates import client_context, server_context
from kernel.errors import BadOption
from kernel.file_threads import in_file_thread

if TYPE_CHECKING:
    from kernel.options import TlsOptions

logger = logging.getLogger(__name__)

#: With this many unsent bytes, nothing more is read from the other end.
_MOST_UNSENT = 1 << 20

#: How long the end of a connection may take, in seconds: to send the rest, and to see that the peer has ended too.
_END_S = 10.0

#: OpenSSL's names of the errors for bytes that are not TLS.
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


def problem_of(error: BaseException, peer: str) -> str:
    """Return the text for an error of a connection with an 'agent' or a 'server'. Pure."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the {peer} is refused: {error.verify_message}"
    if not isinstance(error, ssl.SSLError):
        return f"its encrypted connection failed: {error or type(error).__name__}"
    reason = error.reason or ""
    flag = "--cert-file of naiad agent" if peer == "agent" else "--agent-cert-file"
    if reason in _NO_TLS:
        return f"the {peer} does not use TLS ({flag})"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"the {peer} has shown no certificate ({flag})"
    _, alert, what = reason.partition("_ALERT_")
    if alert:
        return f"the {peer} refuses our certificate: {what.lower().replace('_', ' ')}"
    return f"TLS with the {peer} failed: {reason.lower().replace('_', ' ') or error}"


class _Side(asyncio.Protocol):
    """One of two connections; bytes are copied between them. `other` is set before either is connected."""

    other: _Side

    def __init__(self, among: set[_Side]) -> None:
        """`among` has this side while it is open."""
        self._among = among
        self.transport: asyncio.Transport | None = None
        #: The error that has ended it; None for a regular end.
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(_MOST_UNSENT)
        self._among.add(self)
        if self.other.transport is None:
            self.transport.pause_reading()  # there is nowhere to write to yet
        else:
            self.other.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        other = self.other.transport
        assert other is not None
        if not other.is_closing():
            other.write(data)

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.error = exc
        self._among.discard(self)
        if self.other.transport is not None:
            self.other.transport.close()  # after what is unsent


class Secured:
    """A connection, encrypted or not. The caller owns `socket`, which has the plain bytes."""

    def __init__(self, sock: socket.socket, outer: _Side | None = None, peer: str = "") -> None:
        self.socket = sock
        self._outer = outer
        self._peer = peer

    def problem_after(self, error: BaseException) -> str:
        """Return the problem of the encryption behind an error of the first exchange over `socket`; "" for none."""
        if self._outer is None:
            return ""
        if self._outer.error is not None:  # set before the end of `socket`
            return problem_of(self._outer.error, self._peer)
        if isinstance(error, SaidNothing):  # the handshake of a server ends before the agent checks its certificate
            return f"the {self._peer} has said nothing: if it refuses our certificate, its log has the reason"
        return ""


class Encryption:
    """The certificate of a server or an agent, and the authority of the other side's."""

    def __init__(self, files: TlsOptions, *, listens: bool) -> None:
        """An agent `listens`. Reads the files; raises `BadOption`."""
        self._files = files
        self._listens = listens
        self._stamp = self._read_stamp()
        self._context = self._new_context()
        self._open: set[_Side] = set()

    def close(self) -> None:
        """End all connections at once."""
        for side in list(self._open):
            if side.transport is not None:
                side.transport.abort()

    def _new_context(self) -> ssl.SSLContext:
        context = server_context(self._files) if self._listens else client_context(self._files)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self._listens:
            context.num_tickets = 0  # connections are never resumed
        return context

    def _read_stamp(self) -> tuple[object, ...]:
        """Return a value that changes when a file changes. Blocks."""
        found: list[object] = []
        for path in (self._files.certificate, self._files.key, self._files.client_ca):
            try:
                status = None if path is None else path.stat()
            except OSError:
                status = None
            found.append(None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino))
        return tuple(found)

    def _look(self) -> ssl.SSLContext:
        """Return the context of the files, or the former context if the files are wrong. Blocks."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            try:
                self._context = self._new_context()
            except BadOption as error:  # during a renewal the key may not fit the certificate yet
                logger.warning("the former certificate is used: %s", error)
            else:
                self._stamp = stamp
                logger.info("the new certificate '%s' is used", self._files.certificate)
        return self._context

    async def secure(self, sock: socket.socket, host: str = "") -> Secured:
        """Encrypt the connection of `sock` with the agent called `host`. The caller gives `sock` away.

        Raises `OSError`, and `NotAdmitted` if the sides do not agree.
        """
        owned = socket.socket(fileno=sock.detach())
        inner, outer = _Side(self._open), _Side(self._open)
        inner.other, outer.other = outer, inner
        ours, theirs = socket.socketpair()
        begun = False
        peer = "server" if self._listens else "agent"
        try:
            context = await in_file_thread(self._look)
            owned.setblocking(False)
            loop = asyncio.get_running_loop()
            theirs.setblocking(False)
            await loop.create_unix_connection(lambda: inner, sock=theirs)
            begun = True  # from now on its transport closes the socket
            if self._listens:
                await loop.connect_accepted_socket(
                    lambda: outer, owned, ssl=context, ssl_handshake_timeout=PROOF_S, ssl_shutdown_timeout=_END_S
                )
            else:
                await loop.create_connection(
                    lambda: outer, sock=owned, ssl=context, server_hostname=host, ssl_handshake_timeout=PROOF_S,
                    ssl_shutdown_timeout=_END_S,
                )  # fmt: skip
        except BaseException as error:
            ours.close()
            if inner.transport is None:
                theirs.close()
            else:
                inner.transport.abort()
            if not begun:
                owned.close()
            if isinstance(error, (ssl.SSLError, ConnectionError)):
                raise NotAdmitted(problem_of(error, peer)) from error
            raise
        return Secured(ours, outer, peer)
