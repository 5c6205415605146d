"""The access log of the gRPC front door: calls are observed between the connection and what responds to them.

With --log-access `LoggingAcceptor` takes the place of the listener. Without it nothing here is used.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

from grpclib.const import Status

from kernel.observe.access_log import Access, log_access, peer_text
from protocols.grpc.framing import PREFIX, CompressedMessage, RawPart, RefusedMessage
from protocols.grpc.h2.transport import PassingAcceptor
from protocols.grpc.service import MODEL_INFER
from protocols.grpc.wire_format import read_varint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocols.grpc.framing import ReceivedMessage
    from protocols.grpc.h2.frames import H2ErrorCode
    from protocols.grpc.h2.headers import Trailers
    from protocols.grpc.h2.sending import SendingHalf
    from protocols.grpc.h2.streams import Stream, StreamCallbacks
    from protocols.grpc.h2.transport import ServerConnection
    from shm.tensor import Buffer

#: Tags of the fields of a ModelInferRequest that clients send first (grpc_service.proto).
_NAME, _VERSION, _ID = 0x0A, 0x12, 0x1A


class LoggingAcceptor(PassingAcceptor):
    """Logs each call when it has ended."""

    def accept_call(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        entry = _LogEntry(connection, stream)
        call = self._acceptor.accept_call(cast("ServerConnection", _LoggedConnection(connection, entry)), stream)
        return None if call is None else _LoggedCall(call, entry)


class _LogEntry:
    """What is known of one call so far."""

    def __init__(self, connection: ServerConnection, stream: Stream) -> None:
        self._start_ns = time.monotonic_ns()
        self._stream = stream
        self._logged = False
        self._access = Access(
            peer=peer_text(connection.transport.get_extra_info("peername")),
            method="gRPC",
            path=stream.request_head.path,
            status="",
            duration_ns=0,
            bytes_out=0,
        )

    def read_request(self) -> None:
        """Note the model of the request that has arrived, before the call takes it."""
        stream, access = self._stream, self._access
        if stream.complete_message is not None:
            message: ReceivedMessage | None = stream.complete_message
        else:
            messages = stream.message_reader.messages
            message = messages[0] if messages else None
        if isinstance(message, RefusedMessage):
            message = message.start
        if message is None or isinstance(message, (CompressedMessage, RawPart)):
            return
        if stream.request_head.path == MODEL_INFER and not access.model:
            access.model, access.version, access.request_id = names_in_request(message)

    def add_sent(self, byte_size: int) -> None:
        self._access.bytes_out = (self._access.bytes_out or 0) + byte_size

    def log(self, status: str) -> None:
        """Write the line of the call, which has ended. More calls do nothing."""
        if self._logged:
            return
        self._logged = True
        self._access.status = status
        self._access.bytes_in = self._stream.received_byte_size
        self._access.duration_ns = time.monotonic_ns() - self._start_ns
        log_access(self._access)


class _LoggedConnection:
    """A connection as it is given to what responds to one of its calls."""

    def __init__(self, connection: ServerConnection, entry: _LogEntry) -> None:
        self._connection = connection
        self.sending = _LoggedSending(connection.sending, entry)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class _LoggedSending:
    """The `protocols.grpc.h2.sending.SendingHalf` of a connection, for the response to one call."""

    def __init__(self, sending: SendingHalf, entry: _LogEntry) -> None:
        self._sending = sending
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sending, name)

    def respond(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None = None) -> None:
        self._entry.add_sent(sum(map(len, parts)) + PREFIX.size)
        self._sending.respond(stream, parts, release)
        self._entry.log(Status.OK.name)

    def send_message(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None) -> bool:
        self._entry.add_sent(sum(map(len, parts)) + PREFIX.size)
        return self._sending.send_message(stream, parts, release)

    def send_data(self, stream: Stream, parts: Sequence[Buffer], release: Callable[[], None] | None = None) -> None:
        self._entry.add_sent(sum(map(len, parts)))
        self._sending.send_data(stream, parts, release)

    def send_trailers(self, stream: Stream, trailers: Trailers) -> None:
        self._sending.send_trailers(stream, trailers)
        self._entry.log(status_name(trailers))

    def reset(self, stream: Stream, code: H2ErrorCode) -> None:
        self._sending.reset(stream, code)
        self._entry.log(f"RESET({code.name})")


class _LoggedCall:
    """A `protocols.grpc.h2.streams.StreamCallbacks` that passes everything on to `call`."""

    def __init__(self, call: StreamCallbacks, entry: _LogEntry) -> None:
        self._call = call
        self._entry = entry

    def complete(self, message: bytes | None) -> None:
        self._entry.read_request()
        self._call.complete(message)

    def readable(self) -> None:
        self._entry.read_request()
        self._call.readable()

    def data_sent(self) -> None:
        self._call.data_sent()

    def closed(self) -> None:
        self._entry.log(Status.CANCELLED.name)
        self._call.closed()

    def terminate(self) -> None:
        self._call.terminate()


def names_in_request(message: Buffer) -> tuple[str, str, str]:
    """Return model, version and id from the start of a ModelInferRequest, where clients put them; else empty texts."""
    found = {_NAME: "", _VERSION: "", _ID: ""}
    view, position = memoryview(message), 0
    while position < len(view) and (tag := view[position]) in found:
        size, position = read_varint(view, position + 1)
        found[tag] = bytes(view[position : position + size]).decode(errors="replace")
        position += size
    return found[_NAME], found[_VERSION], found[_ID]


def status_name(trailers: Trailers) -> str:
    """Return the name of a status in gRPC, else its number, else the status of HTTP."""
    if trailers.grpc_status is None:
        return f"HTTP({trailers.http_status})"
    return _NAMES.get(trailers.grpc_status, str(trailers.grpc_status))


_NAMES = {status.value: status.name for status in Status}
