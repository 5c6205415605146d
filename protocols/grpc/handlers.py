"""Calls that grpclib's handlers answer, on our side of HTTP/2: every RPC but the unary inference.

`HandlerCall` is to `grpclib.server.request_handler` what `grpclib.protocol.Stream` is, so that services,
`GRPCError`, metadata and deadlines are grpclib's.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.events import _DispatchServerEvents
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import Peer
from grpclib.server import request_handler
from h2.exceptions import StreamClosedError

from protocols.grpc.compression import compress
from protocols.grpc.framing import PREFIX
from protocols.grpc.h2.frames import ErrorCode
from protocols.grpc.h2.headers import encode_block

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from grpclib.const import Handler
    from grpclib.utils import Wrapper

    from kernel.request import Buffer
    from protocols.grpc.compression import ResponseCompression
    from protocols.grpc.h2.headers import Fields
    from protocols.grpc.h2.streams import Stream
    from protocols.grpc.h2.transport import ServerConnection

#: What a call says that is cut off while the server stops.
CUT_OFF = "Server exiting: the call took too long"


class Handlers:
    """Runs a task for each call, with the handler of its path."""

    def __init__(
        self,
        mapping: dict[str, Handler],
        compression: ResponseCompression | None = None,
        compressed_paths: frozenset[str] = frozenset(),
    ) -> None:
        """`compression` is for the answers of `compressed_paths`."""
        self._mapping = mapping
        self._compression = compression
        self._compressed_paths = compressed_paths
        self._codec = ProtoCodec()
        self._dispatch = _DispatchServerEvents()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, connection: ServerConnection, stream: Stream) -> HandlerCall:
        """Start the handler of a call that has just come."""
        call = self._call(connection, stream)
        call.task = asyncio.get_running_loop().create_task(
            request_handler(
                self._mapping,
                call,  # type: ignore[arg-type]  # it offers what the handler uses of grpclib's stream
                stream.head.fields,
                self._codec,
                None,
                self._dispatch,
                call.release,
            )
        )
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)
        return call

    def _call(self, connection: ServerConnection, stream: Stream) -> HandlerCall:
        if self._compression is not None and stream.head.path in self._compressed_paths:
            encoding = self._compression.choose(stream.head)
            if encoding is not None:
                return CompressedCall(connection, stream, encoding)
        return HandlerCall(connection, stream)

    @property
    def running(self) -> set[asyncio.Task[None]]:
        return self._tasks


class _ConnectionFacts:
    """What grpclib's server asks of a connection: the peer, and counters that nobody reads."""

    messages_received = 0
    messages_sent = 0
    last_message_received: float | None = None
    last_message_sent: float | None = None

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def get_peer(self) -> Peer:
        return Peer(self._transport)


class HandlerCall:
    """One call with its handler's task. Methods without a docstring are those of grpclib's stream."""

    def __init__(self, connection: ServerConnection, stream: Stream) -> None:
        self.task: asyncio.Task[None] | None = None
        self.wrapper: Wrapper | None = None
        self.connection = _ConnectionFacts(connection.transport)
        self._transport = connection.transport
        self._wire = connection
        self._stream = stream
        #: The rest of the message that the handler is reading.
        self._unread: Buffer | None = None
        #: One task of a handler reads while another sends.
        self._reading: asyncio.Future[None] | None = None
        self._sending: asyncio.Future[None] | None = None

    # ---- protocols.grpc.h2.streams.Call -------------------------------------------------------

    def readable(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def sent(self) -> None:
        if self._sending is not None and not self._sending.done():
            self._sending.set_result(None)

    def closed(self) -> None:
        """The client has gone, or has reset the call."""
        if self.wrapper is not None:
            self.wrapper.cancel(StreamTerminatedError("the call was ended by its client or its connection"))
        if self.task is not None:
            self.task.cancel()

    def cut_off(self) -> None:
        if self.wrapper is not None:
            self.wrapper.cancel(GRPCError(Status.UNAVAILABLE, CUT_OFF))

    # ---- grpclib.protocol.Stream ---------------------------------------------------------------

    async def recv_data(self, size: int) -> bytes:
        """Return the prefix of the next message, or the message; empty behind the last one.

        grpclib asks for the one and then the other. Raises `GRPCError` for a fault in the messages.
        """
        if self._unread is not None:
            unread, self._unread = self._unread, None
            return bytes(unread)
        message = await self.next_message()
        if message is None:
            return b""
        if len(message):
            self._unread = message
        return PREFIX.pack(0, len(message))

    # ---- for handlers that read and write messages by themselves ------------------------------

    def place_messages(self, place: Callable[[bytes, int], memoryview | None]) -> None:
        """Have large messages received where `place` says, see `MessageReader.place`."""
        self._stream.reader.place = place

    async def next_message(self) -> Buffer | None:
        """Return the bytes of the next message, None behind the last one. Raises `GRPCError`."""
        reader = self._stream.reader
        while not reader.messages:
            if reader.fault is not None:
                raise GRPCError(reader.fault.status, reader.fault.text)
            if self._stream.remote_closed:
                return None
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        message = reader.messages.popleft()
        self._wire.machine.consumed(self._stream)
        self._wire.wake()
        return message

    async def send_message(self, parts: Sequence[Buffer], release: Callable[[], None]) -> None:
        """Send a message, whose bytes are `parts`; returns when windows and the socket have taken it.

        `release` is called, however this ends, when the parts are not needed any more. The headers of the
        answer must have been sent.
        """
        if not self._stream.open:
            release()
        self._check_open()
        left = self._wire.machine.send_message(self._stream, parts, release)
        self._wire.wake()
        if not left:
            await self._wait_until_sent()

    # ---- grpclib.protocol.Stream ---------------------------------------------------------------

    async def send_headers(self, headers: Fields, end_stream: bool = False) -> None:
        self._check_open()
        block = encode_block(headers)
        if end_stream:
            self._wire.machine.drop_data(self._stream)  # of a message that was being sent when the call failed
            self._wire.machine.send_trailers(self._stream, block)
        else:
            self._wire.machine.send_headers(self._stream, block)
        self._wire.wake()

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send `data`; returns when the client's windows and the socket have taken it."""
        self._check_open()
        self._wire.machine.send_data(self._stream, [data])
        self._wire.wake()
        await self._wait_until_sent()

    async def _wait_until_sent(self) -> None:
        while self._stream.open and self._stream.output is not None and self._stream.output.waiting:
            self._sending = asyncio.get_running_loop().create_future()
            await self._sending

    async def reset(self) -> None:
        self.reset_nowait()

    def reset_nowait(self) -> None:
        if self._stream.open:
            self._wire.machine.reset(self._stream, ErrorCode.NO_ERROR)
            self._wire.wake()

    @property
    def closable(self) -> bool:
        return self._stream.open

    def release(self) -> Any:
        """The handler has ended. Where it did not even send a status, the client is not left waiting."""
        if self._stream.open:
            self._wire.machine.reset(self._stream, ErrorCode.INTERNAL_ERROR)
        self._wire.wake()

    def _check_open(self) -> None:
        if not self._stream.open:
            raise StreamClosedError(self._stream.number)


class CompressedCall(HandlerCall):
    """One call whose messages, given to `send_message`, are compressed where that makes them smaller."""

    def __init__(self, connection: ServerConnection, stream: Stream, encoding: str) -> None:
        super().__init__(connection, stream)
        self._encoding = encoding

    async def send_headers(self, headers: Fields, end_stream: bool = False) -> None:
        if not end_stream:
            headers = [*headers, ("grpc-encoding", self._encoding)]
        await super().send_headers(headers, end_stream)

    async def send_message(self, parts: Sequence[Buffer], release: Callable[[], None]) -> None:
        try:
            message = await compress(self._encoding, parts)
        finally:
            release()
        await self.send_data(message)
