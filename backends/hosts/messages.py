"""What a server and the agent of another host say: how each proves that it has the token, and the messages.

The agent listens. A server has one *control* connection to it, and one *data* connection for each worker, which becomes
the worker's own after the model's files have come over it. Each begins with `prove` and `admit`: the token itself is
never sent, and an answer cannot be used a second time. It is encrypted if both sides have certificates, see
`backends.hosts.encryption`.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
import time
from typing import TYPE_CHECKING

import msgspec

from backends.transport.framing import LENGTH
from kernel.errors import InvalidArgument
from kernel.regular_files import read_regular
from kernel.repository.described_files import LaunchDescription

if TYPE_CHECKING:
    import socket
    from pathlib import Path

#: How often each side of a control connection sends something, and after how many times without anything received the
#: other side counts as lost, in seconds: a host that is cut off ends no connection.
BEAT_S = 0.5
LOST_BEATS = 4

#: How long a peer may take to prove that it has the token, in seconds.
PROOF_S = 10.0

#: The longest message in bytes. The longest has the names and digests of 100,000 files.
MAX_MESSAGE = 64 << 20

_MAGIC = b"naiad-agent-1\n"
_NONCE = 32
_PROOF = 32

#: Session and number of the worker whose connection it is; the number of a control connection is 0.
_PURPOSE = struct.Struct("<16sQ")


#: The fewest characters of a token. It is no word that a person thinks of: who guesses it may run programs.
_LEAST_TOKEN = 16


def read_token(path: Path) -> bytes:
    """Return the token in a file, without spaces around it. Raises `InvalidArgument`, also if others may read it."""
    try:
        if path.stat().st_mode & 0o077:
            raise InvalidArgument(f"others may read the token file '{path}': chmod 600 '{path}'")
        token = read_regular(path, 4096).strip()
    except OSError as error:
        raise InvalidArgument(f"the token file '{path}' cannot be read: {error.strerror}") from None
    if len(token) < _LEAST_TOKEN:
        raise InvalidArgument(
            f"the token in '{path}' must have at least {_LEAST_TOKEN} characters: make one with "
            "`(umask 077; openssl rand -hex 32 > FILE)`"
        )
    return token


class Purpose(msgspec.Struct, frozen=True):
    """What a connection is for."""

    #: Of a server's control connection; the server has chosen it at random. 16 bytes.
    session: bytes
    #: The worker's number in the session, from 1 on; 0 for the control connection itself.
    worker: int = 0


class NotAdmitted(Exception):
    """The peer does not have the same token, or is no agent; the message says it."""


class SaidNothing(NotAdmitted):
    """The peer has not even said that it is an agent."""


def prove(sock: socket.socket, token: bytes, purpose: Purpose, limit_s: float = PROOF_S) -> None:
    """Prove to an agent that this side has its token, and check that the agent has it. Blocks for up to `limit_s`.

    Raises `OSError` and `NotAdmitted`. The socket has no timeout afterwards.
    """
    end_s = time.monotonic() + limit_s
    sock.settimeout(limit_s)
    try:
        magic = receive_exactly(sock, len(_MAGIC), end_s)
    except (TimeoutError, ConnectionError) as error:
        raise SaidNothing(
            f"it has said nothing ({error}): it may be no agent, or one that needs TLS (--agent-cert-file)"
        ) from error
    if magic != _MAGIC:
        raise NotAdmitted("what listens there is no agent of this version")
    theirs, ours = receive_exactly(sock, _NONCE, end_s), secrets.token_bytes(_NONCE)
    about = _PURPOSE.pack(purpose.session, purpose.worker)
    sock.sendall(ours + about + _proof(token, b"server", theirs, ours, about))
    try:
        found = receive_exactly(sock, _PROOF, end_s)
    except ConnectionError as error:
        raise NotAdmitted("the agent has another token (--agent-token-file)") from error
    if not hmac.compare_digest(found, _proof(token, b"agent", theirs, ours, about)):
        raise NotAdmitted("the agent has another token (--agent-token-file)")
    sock.settimeout(None)


def receive_exactly(sock: socket.socket, byte_size: int, end_s: float = 0.0) -> bytes:
    """Return exactly `byte_size` bytes from a blocking socket. Raises `OSError`, and `ConnectionError` at its end.

    Raises `TimeoutError` at the time `end_s` of `time.monotonic`, because a peer may send a byte at a time. 0 for no
    limit.
    """
    data = bytearray()
    while len(data) < byte_size:
        if end_s:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left_s)
        if not (portion := sock.recv(byte_size - len(data))):
            raise ConnectionResetError("the connection ended")
        data += portion
    return bytes(data)


async def admit(sock: socket.socket, token: bytes) -> Purpose:
    """Let a server prove that it has the token, and prove it to the server. The socket does not block.

    Raises `OSError` and `NotAdmitted`. The caller limits the time.
    """
    loop, ours = asyncio.get_running_loop(), secrets.token_bytes(_NONCE)
    await loop.sock_sendall(sock, _MAGIC + ours)
    received = bytearray()
    while len(received) < _NONCE + _PURPOSE.size + _PROOF:
        portion = await loop.sock_recv(sock, _NONCE + _PURPOSE.size + _PROOF - len(received))
        if not portion:
            raise ConnectionResetError("the connection ended")
        received += portion
    theirs, about = bytes(received[:_NONCE]), bytes(received[_NONCE:-_PROOF])
    if not hmac.compare_digest(received[-_PROOF:], _proof(token, b"server", ours, theirs, about)):
        raise NotAdmitted("the peer has another token")
    await loop.sock_sendall(sock, _proof(token, b"agent", ours, theirs, about))
    return Purpose(*_PURPOSE.unpack(about))


def _proof(token: bytes, side: bytes, agent_nonce: bytes, server_nonce: bytes, about: bytes) -> bytes:
    return hmac.digest(token, side + agent_nonce + server_nonce + about, "sha256")


# ---- messages --------------------------------------------------------------------------------


class AgentMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message of a control connection."""


class Beat(AgentMessage, frozen=True, tag=True, array_like=True):
    """The sender lives. An agent says of each worker whether a signal has stopped it, and a mark of its work."""

    workers: tuple[tuple[int, bool, int], ...] = ()
    #: How many workers the agent has for other sessions, those of this server that still end among them.
    others: int = 0


class Claim(AgentMessage, frozen=True, tag=True, array_like=True):
    """The first message of a server. Workers that the agent has of an earlier `epoch` of this server are ended."""

    #: Chosen at random when the server has started.
    server: str
    #: Grows with each control connection of the server to the agent.
    epoch: int
    #: As `backends.transport.wire.PROTOCOL`.
    protocol: str
    #: How much each worker may print, as `backends.launch.output.OutputLimits`.
    lines_per_s: int
    bytes_per_s: int


class Welcome(AgentMessage, frozen=True, tag=True, array_like=True):
    """The agent takes workers."""

    #: The name of its host.
    host: str
    #: The most workers at the same time, of all servers; 0 for no limit.
    max_workers: int
    #: How many of them other servers have now.
    others: int


class Refused(AgentMessage, frozen=True, tag=True, array_like=True):
    """The agent takes no workers of this server; the connection ends."""

    text: str


class LaunchWorker(AgentMessage, frozen=True, tag=True, array_like=True):
    """Start a worker when its files have come over a data connection, which the agent expects after `Expected`."""

    worker: int
    title: str
    backend: str
    version: int
    memory_limit_byte_size: int
    #: A `LaunchDescription` in MessagePack. With many files, `encode_description` and `decode_description` would block
    #: an event loop for too long, so threads run them.
    description: msgspec.Raw


class Expected(AgentMessage, frozen=True, tag=True, array_like=True):
    """The agent expects the data connection of a worker."""

    worker: int


class Waits(AgentMessage, frozen=True, tag=True, array_like=True):
    """What the start of a worker waits for; "" for nothing any more."""

    worker: int
    text: str


class WorkerStarted(AgentMessage, frozen=True, tag=True, array_like=True):
    """The worker has its data connection, and finds its model in this folder of its host."""

    worker: int
    folder: str


class NotStarted(AgentMessage, frozen=True, tag=True, array_like=True):
    """A worker could not be started. The code is one of `kernel.errors.ErrorCode`."""

    worker: int
    code: str
    text: str
    #: Whether the host has no room: the launch may wait for it.
    full: bool = False


class WorkerEnded(AgentMessage, frozen=True, tag=True, array_like=True):
    """A worker has ended; the cause is that of `Launched.on_lost`."""

    worker: int
    cause: str


class Printed(AgentMessage, frozen=True, tag=True, array_like=True):
    """A line that a worker has printed, with its level in the log."""

    worker: int
    level: int
    text: str


class SignalWorker(AgentMessage, frozen=True, tag=True, array_like=True):
    """Send a signal to a worker: `TERM`, `KILL`, or `STACKS` to let it log where its threads are."""

    worker: int
    name: str


ToAgent = Beat | Claim | LaunchWorker | SignalWorker
ToServer = Beat | Welcome | Refused | Expected | Waits | WorkerStarted | NotStarted | WorkerEnded | Printed

_encoder = msgspec.msgpack.Encoder()
to_agent_decoder = msgspec.msgpack.Decoder(ToAgent)
to_server_decoder = msgspec.msgpack.Decoder(ToServer)


_description_decoder = msgspec.msgpack.Decoder(LaunchDescription)


def encode_description(description: LaunchDescription) -> msgspec.Raw:
    """Return it as `LaunchWorker` has it. Blocks for a tenth of a second for 100,000 files."""
    return msgspec.Raw(_encoder.encode(description))


def decode_description(data: msgspec.Raw) -> LaunchDescription:
    """Read it. Blocks as `encode_description`. Raises `msgspec.DecodeError`."""
    return _description_decoder.decode(data)


def framed(message: AgentMessage) -> bytes:
    """Return a message after its length, see `backends.transport.framing`."""
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


class Silence:
    """Decides when a peer is lost that sends nothing. Pure: time passes with `beat`, so the time in which the own event
    loop is busy does not count as the peer's silence."""

    def __init__(self, lost_beats: int = LOST_BEATS) -> None:
        self._beats = 0
        self._lost_beats = lost_beats

    def heard(self) -> None:
        """Something was received."""
        self._beats = 0

    def beat(self) -> bool:
        """Another `BEAT_S` has passed. Returns whether the peer is lost."""
        self._beats += 1
        return self._beats > self._lost_beats
