"""Where the gRPC front door meets the access log: calls are watched between the connection and who answers them.

Only in use with --log-access, by `WatchingOwner` in the place of the listener: without it nothing here is on
the way of a call.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from grpclib.const import Status
from hpack import Decoder

from kernel.observe.access import Access, log_access, peer_text
from protocols.grpc.framing import PREFIX
from protocols.grpc.service import MODEL_INFER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocols.grpc.h2.frames import H2ErrorCode
    from protocols.grpc.h2.streams import Stream, StreamCallbacks
    from protocols.grpc.h2.transport import CallAcceptor, ServerConnection
    from shm.tensor import Buffer

#: Fields of a ModelInferRequest that clients send first (grpc_service.proto), with their wire tags.
_NAME, _VERSION, _ID = 0x0A, 0x12, 0x1A


class WatchingOwner:
    """A `protocols.grpc.h2.transport.CallAcceptor` that has `owner` answer, and logs each call when it has ended."""

    def __init__(self, owner: CallAcceptor) -> None:
        self._owner = owner

    def opened(self, connection: ServerConnection) -> None:
        self._owner.opened(connection)

    def closed(self, connection: ServerConnection) -> None:
        self._owner.closed(connection)

    def quiet(self) -> None:
        self._owner.quiet()

    def answer(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        watch = _Watch(connection, stream)
        call = self._owner.answer(cast("ServerConnection", _WatchedConnection(connection, watch)), stream)
        return None if call is None else _WatchedCall(call, watch)


class _Watch:
    """What is known of one call so far."""

    def __init__(self, connection: ServerConnection, stream: Stream) -> None:
        self._begin_ns = time.monotonic_ns()
        self._stream = stream
        self._logged = False
        self._access = Access(
            peer=peer_text(connection.transport.get_extra_info("peername")),
            method="gRPC",
            path=stream.head.path,
            status="",
            duration_ns=0,
            bytes_out=0,
        )

    def look(self) -> None:
        """See what has come of the call before somebody takes it."""
        stream, access = self._stream, self._access
        if stream.whole is not None:
            message: Buffer | None = stream.whole
        else:
            message = stream.reader.messages[0] if stream.reader.messages else None
        if message is not None and stream.head.path == MODEL_INFER and not access.model:
            access.model, access.version, access.request_id = begin_of_request(message)

    def sent(self, byte_size: int) -> None:
        self._access.bytes_out = (self._access.bytes_out or 0) + byte_size

    def ended(self, status: str) -> None:
        if self._logged:
            return
        self._logged = True
        self._access.status = status
        self._access.bytes_in = self._stream.received
        self._access.duration_ns = time.monotonic_ns() - self._begin_ns
        log_access(self._access)


class _WatchedConnection:
    """A connection as it is given to who answers a call of it."""

    def __init__(self, connection: ServerConnection, watch: _Watch) -> None:
        self._connection = connection
        self.machine = _WatchedMachine(connection.machine, watch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class _WatchedMachine:
    """The sending half of a connection, as `protocols.grpc.h2.answers.SendingHalf`, for the answer of one call."""

    def __init__(self, machine: Any, watch: _Watch) -> None:
        self._machine = machine
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def respond(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None = None) -> None:
        self._watch.sent(sum(map(len, parts)) + PREFIX.size)
        self._machine.respond(stream, parts, release)
        self._watch.ended(Status.OK.name)

    def send_message(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None) -> bool:
        self._watch.sent(sum(map(len, parts)) + PREFIX.size)
        left: bool = self._machine.send_message(stream, parts, release)
        return left

    def send_data(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None = None) -> None:
        self._watch.sent(sum(map(len, parts)))
        self._machine.send_data(stream, parts, release)

    def send_trailers(self, stream: Stream, block: bytes) -> None:
        self._machine.send_trailers(stream, block)
        self._watch.ended(status_of(block))

    def reset(self, stream: Stream, code: H2ErrorCode) -> None:
        self._machine.reset(stream, code)
        self._watch.ended(f"RESET({code.name})")


class _WatchedCall:
    """A `protocols.grpc.h2.streams.StreamCallbacks` that hands on what it is told."""

    def __init__(self, call: StreamCallbacks, watch: _Watch) -> None:
        self._call = call
        self._watch = watch

    def readable(self) -> None:
        self._watch.look()
        self._call.readable()

    def sent(self) -> None:
        self._call.sent()

    def closed(self) -> None:
        self._watch.ended(Status.CANCELLED.name)
        self._call.closed()

    def cut_off(self) -> None:
        self._call.cut_off()


def begin_of_request(message: Buffer) -> tuple[str, str, str]:
    """Return name, version and id from the begin of a ModelInferRequest, where clients put them; else empty texts."""
    found = {_NAME: "", _VERSION: "", _ID: ""}
    position = 0
    while position < len(message) and message[position] in found:
        tag, size, shift = message[position], 0, 0
        position += 1
        while position < len(message) and shift < 35:
            octet = message[position]
            position += 1
            size |= (octet & 0x7F) << shift
            shift += 7
            if octet < 0x80:
                break
        found[tag] = bytes(message[position : position + size]).decode(errors="replace")
        position += size
    return found[_NAME], found[_VERSION], found[_ID]


def status_of(block: bytes) -> str:
    """Return the status in a header block that we have made: gRPC's name, else that of HTTP."""
    fields = {str(name): str(value) for name, value in Decoder().decode(block)}
    code = fields.get("grpc-status")
    if code is None:
        return f"HTTP({fields.get(':status', '-')})"
    return _NAMES.get(code, code)


_NAMES = {str(status.value): status.name for status in Status}
