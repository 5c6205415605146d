"""Calls that grpclib's handlers respond to, over our own HTTP/2: every RPC but the unary inference.

`HandlerCall` takes the part of grpclib's own stream (`grpclib_internals.CallStream`), so that services,
`GRPCError`, metadata and deadlines are grpclib's.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from protocols.grpc.compression import compress
from protocols.grpc.framing import (
    MAX_INFLATED_BYTE_SIZE,
    PREFIX,
    CompressedMessage,
    InflatedTooLarge,
    RefusedMessage,
    broken_compression,
    inflate,
)
from protocols.grpc.grpclib_internals import CallConnection, StreamClosedError, run_handler
from protocols.grpc.h2.frames import H2ErrorCode
from protocols.grpc.h2.headers import encode_block, encode_trailers
from protocols.grpc.h2.states import StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from grpclib.const import Handler

    from protocols.access import Peer
    from protocols.grpc.compression import ResponseCompression
    from protocols.grpc.framing import ReceivedMessage
    from protocols.grpc.grpclib_internals import Wrapper
    from protocols.grpc.h2.headers import Fields, RequestHead
    from protocols.grpc.h2.streams import Stream
    from protocols.grpc.h2.transport import ServerConnection
    from shm.tensor import Buffer

# A name of this module is found faster than a member of an enum (states.py).
_CLOSED = StreamState.CLOSED

#: The status message of a call that the server terminates because it stops.
CALL_TERMINATED = "Server exiting: the call took too long"


class Handlers:
    """Runs a task for each call, with the handler of its path."""

    def __init__(
        self,
        mapping: dict[str, Handler],
        compression: ResponseCompression | None = None,
        compressed_paths: frozenset[str] = frozenset(),
    ) -> None:
        """`compression` is for the responses of `compressed_paths`."""
        self._mapping = mapping
        self._compression = compression
        self._compressed_paths = compressed_paths
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, connection: ServerConnection, stream: Stream) -> HandlerCall:
        """Start the handler of a call that has just arrived."""
        call = self._call(connection, stream)
        call.task = asyncio.get_running_loop().create_task(run_handler(self._mapping, call, stream.request_head.fields))
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)
        return call

    def _call(self, connection: ServerConnection, stream: Stream) -> HandlerCall:
        if self._compression is not None and stream.request_head.path in self._compressed_paths:
            encoding = self._compression.choose(stream.request_head)
            if encoding is not None:
                return CompressedCall(connection, stream, encoding)
        return HandlerCall(connection, stream)

    @property
    def running(self) -> set[asyncio.Task[None]]:
        return self._tasks


class HandlerCall:
    """One call with its handler's task. Methods without a docstring are as in grpclib's stream."""

    def __init__(self, connection: ServerConnection, stream: Stream) -> None:
        self.task: asyncio.Task[None] | None = None
        self.wrapper: Wrapper | None = None
        self.connection = CallConnection(connection.transport)
        self._transport = connection.transport
        self._server_connection = connection
        self._stream = stream
        self._reader = stream.message_reader
        self._reader.choice_follows = True
        #: The message whose prefix the handler has read.
        self._unread: Buffer | None = None
        #: One task of a handler reads while another sends.
        self._reading: asyncio.Future[None] | None = None
        self._sending: asyncio.Future[None] | None = None
        #: Set by a handler that takes and sends messages by itself, see `set_callbacks`.
        self._on_readable: Callable[[], None] | None = None
        self._on_sent: Callable[[], None] | None = None
        #: Whether something else responds to the call since then.
        self._left = False

    @property
    def peer(self) -> Peer:
        """The client."""
        return self._server_connection.peer

    @property
    def request_head(self) -> RequestHead:
        return self._stream.request_head

    # ---- protocols.grpc.h2.streams.StreamCallbacks -------------------------------------------------------

    def complete(self, message: bytes | None) -> None:
        assert message is None, "the reader of a handler's call has its message"
        self.readable()

    def readable(self) -> None:
        if self._on_readable is not None:
            self._on_readable()
        elif self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    def data_sent(self) -> None:
        if self._on_sent is not None:
            self._on_sent()
        elif self._sending is not None and not self._sending.done():
            self._sending.set_result(None)

    def closed(self) -> None:
        """The client has disconnected, or has reset the call."""
        if self.wrapper is not None:
            self.wrapper.cancel(StreamTerminatedError("the call was ended by its client or its connection"))
        if self.task is not None:
            self.task.cancel()

    def terminate(self) -> None:
        if self.wrapper is not None:
            self.wrapper.cancel(GRPCError(Status.UNAVAILABLE, CALL_TERMINATED))

    # ---- grpclib.protocol.Stream ---------------------------------------------------------------

    async def recv_data(self, size: int) -> bytes:
        """Return the prefix of the next message, or the message; nothing after the last one.

        grpclib asks for the prefix and then for the message. Raises `GRPCError` for a fault in the messages.
        """
        if self._unread is not None:
            unread, self._unread = self._unread, None
            return bytes(unread)
        message = await self.receive_message()
        if message is None:
            return b""
        if len(message):
            self._unread = message
        return PREFIX.pack(0, len(message))

    async def receive_message(self) -> Buffer | None:
        """Return the bytes of the next message, not copied; None after the last one. Raises `GRPCError`."""
        while (received := self.take_message()) is None:
            if self._stream.request_ended:
                return None
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        return await _inflated(received, self._reader.max_byte_size)

    def receive_large_messages_in(self, choose_buffer: Callable[[bytes, int], memoryview]) -> None:
        """Receive large messages where `choose_buffer` says, see `MessageReader.choose_buffer`."""
        self._reader.choose_buffer = choose_buffer

    # ---- for handlers that take and send messages in callbacks, without a task that waits for each ----

    def set_callbacks(
        self,
        readable: Callable[[], None],
        sent: Callable[[], None],
        choose_buffer: Callable[[bytes, int], memoryview],
    ) -> None:
        """Have the handler called from now on. None of the functions may raise.

        Args:
            readable: called when messages, a fault in them, or the end of the request have arrived.
            sent: called when a message has left that had to wait.
            choose_buffer: called for a large message, see `MessageReader.choose_buffer`.
        """
        self._on_readable, self._on_sent = readable, sent
        self._reader.choose_buffer = choose_buffer

    def take_message(self) -> ReceivedMessage | None:
        """Return the bytes of the next message, None if there is none yet. Raises `GRPCError` for a fault behind it."""
        reader = self._reader
        if not reader.messages:
            if reader.fault is not None:
                raise GRPCError(reader.fault.status, reader.fault.text)
            return None
        message = reader.take()
        self._server_connection.sending.consumed(self._stream)
        self._server_connection.schedule_write()
        return message

    @property
    def at_end(self) -> bool:
        """Whether the client has sent its last message, and it was taken."""
        return self._stream.request_ended and not self._reader.messages

    def send_message_nowait(self, parts: Sequence[Buffer], release: Callable[[], None] | None) -> bool:
        """Send a message, whose bytes are `parts`; returns whether it has left. Raises `StreamClosedError`.

        If it has not, no other may be sent before `sent` is called. `release` is called, also after an error, when
        the parts are not used any more. The headers of the response must have been sent.
        """
        if self._stream.state is _CLOSED:
            if release is not None:
                release()
            raise StreamClosedError(self._stream.id)
        left = self._server_connection.sending.send_message(self._stream, parts, release)
        self._server_connection.schedule_write()
        return left

    # ---- grpclib.protocol.Stream ---------------------------------------------------------------

    async def send_headers(self, headers: Fields, end_stream: bool = False) -> None:
        self._check_open()
        if end_stream:
            self._server_connection.sending.drop_data(
                self._stream
            )  # of a message that was being sent when the call failed
            self._server_connection.sending.send_trailers(self._stream, encode_trailers(headers))
        else:
            self._server_connection.sending.send_headers(self._stream, encode_block(headers))
        self._server_connection.schedule_write()

    async def send_data(self, data: bytes, end_stream: bool = False) -> None:
        """Send `data`; returns when it has left: within the client's windows, and to the socket."""
        self._check_open()
        self._server_connection.sending.send_data(self._stream, [data])
        self._server_connection.schedule_write()
        await self._wait_until_sent()

    async def _wait_until_sent(self) -> None:
        while self._stream.is_open and self._stream.pending is not None and self._stream.pending.is_waiting:
            self._sending = asyncio.get_running_loop().create_future()
            await self._sending

    async def reset(self) -> None:
        self.reset_nowait()

    def reset_nowait(self) -> None:
        if self._stream.is_open:
            self._server_connection.sending.reset(self._stream, H2ErrorCode.NO_ERROR)
            self._server_connection.schedule_write()

    @property
    def closable(self) -> bool:
        return self._stream.is_open

    def release(self) -> Any:
        """The handler has ended. If it has sent no status, the stream is reset, so that the client does not wait."""
        if self._stream.is_open and not self._left:
            self._server_connection.sending.reset(self._stream, H2ErrorCode.INTERNAL_ERROR)
        self._server_connection.schedule_write()

    def leave(self) -> None:
        """Let something else respond to the call: the handler is about to end without a status, and as cancelled."""
        self._left = True

    def _check_open(self) -> None:
        if not self._stream.is_open:
            raise StreamClosedError(self._stream.id)


async def _inflated(message: ReceivedMessage, max_byte_size: int) -> Buffer:
    """Return the bytes of a message of an RPC other than inference. Raises `GRPCError` or `ServingError`."""
    if isinstance(message, RefusedMessage):
        raise message.error
    if not isinstance(message, CompressedMessage):
        return message
    limit = min(max_byte_size, MAX_INFLATED_BYTE_SIZE)
    try:
        # zlib lets other threads run.
        content = await asyncio.to_thread(inflate, message.content, message.encoding, limit)
    except InflatedTooLarge as error:
        raise GRPCError(Status.RESOURCE_EXHAUSTED, str(error)) from None
    if content is None:
        raise GRPCError(Status.INTERNAL, broken_compression(message.encoding))
    return content


class CompressedCall(HandlerCall):
    """One call whose messages, given to `send_message_nowait`, are compressed where that makes them smaller."""

    def __init__(self, connection: ServerConnection, stream: Stream, encoding: str) -> None:
        super().__init__(connection, stream)
        self._encoding = encoding
        self._compressing: asyncio.Task[bytes] | None = None

    async def send_headers(self, headers: Fields, end_stream: bool = False) -> None:
        if not end_stream:
            headers = [*headers, ("grpc-encoding", self._encoding)]
        await super().send_headers(headers, end_stream)

    def send_message_nowait(self, parts: Sequence[Buffer], release: Callable[[], None] | None) -> bool:
        if not self._stream.is_open:
            if release is not None:
                release()
            raise StreamClosedError(self._stream.id)
        self._compressing = asyncio.get_running_loop().create_task(compress(self._encoding, parts))
        self._compressing.add_done_callback(functools.partial(self._compressed, release))
        return False

    def _compressed(self, release: Callable[[], None] | None, compressing: asyncio.Task[bytes]) -> None:
        if release is not None:
            release()
        if compressing.cancelled():
            return
        error = compressing.exception()
        if isinstance(error, Exception):  # there was no memory for it
            assert self.wrapper is not None, "grpclib sets it before the handler starts"
            self.wrapper.cancel(error)
        elif self._stream.is_open:
            # `data_sent` is called when it has left.
            self._server_connection.sending.send_data(self._stream, [compressing.result()])
            self._server_connection.schedule_write()
