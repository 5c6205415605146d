"""gRPC in a process of its own: the connections of a front door, and which of their calls it serves itself.

A door serves inference. All other calls, and inference that it cannot serve (models that it does not know, messages
that a helper would decode, or for which it has no memory), are passed on to the kernel's process (`relay.py`). A stream
is passed on from the first request on that the door cannot serve, once all earlier ones have their responses: so
requests and responses keep their order.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import TYPE_CHECKING, Any, cast

import msgspec
from grpclib.const import Cardinality, Handler, Status

from kernel.background import BackgroundTasks
from kernel.errors import ServedElsewhere, ServingError
from protocols.access import Category, Restrictions
from protocols.grpc.compression import make_compression
from protocols.grpc.framing import PREFIX, CompressedMessage, RawPart, RefusedMessage
from protocols.grpc.generated import grpc_service_pb2 as pb
from protocols.grpc.grpclib_internals import stream_of
from protocols.grpc.h2.headers import status_trailers
from protocols.grpc.h2.transport import message_budget
from protocols.grpc.handlers import HandlerCall, Handlers
from protocols.grpc.intake import ENTRY_POINT, MessageIntake, make_metadata_forwarder
from protocols.grpc.prepared import model_of
from protocols.grpc.relay import LOST, PassingReader, Relay, RelayedCall, raw_message
from protocols.grpc.rpc import OpenCalls, grpc_error, translated_errors
from protocols.grpc.rpcs.infer import InferCall, Inference
from protocols.grpc.rpcs.stream import StreamCall
from protocols.grpc.server import GrpcDoorSettings, GrpcListener, ListenerOptions
from protocols.grpc.service import MODEL_INFER, MODEL_STREAM_INFER, Admission
from protocols.intake import take
from protocols.listening import adopt

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from grpclib.server import Stream as GrpcStream

    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.serving.request import Request
    from protocols.frontend import DoorKernelInterface
    from protocols.grpc.framing import ReceivedMessage
    from protocols.grpc.h2.headers import Fields
    from protocols.grpc.h2.streams import Stream, StreamCallbacks
    from protocols.grpc.h2.transport import ServerConnection
    from protocols.grpc.rpcs.stream_messages import StreamRequest
    from protocols.intake import HelperJob

    #: Passes a call on, with these headers; None where that is not possible, and the call has got its status.
    PassOn = Callable[[ServerConnection, Stream], RelayedCall | None]

logger = logging.getLogger(__name__)

#: How long the adoption of a connection may take; it takes an iteration or two of the event loop.
_ADOPTION_S = 1.0

#: The most that the number of a timeout may be (gRPC over HTTP/2).
_MOST_TIMEOUT = 10**8 - 1


def _no_helper(message: ReceivedMessage) -> None:
    """Raise `ServedElsewhere` for a message that only a helper can decode, and what is wrong with a refused one."""
    if not isinstance(message, RefusedMessage):
        raise ServedElsewhere("")


class DoorInference(Inference):
    """The unary inference RPC of a door."""

    kernel: DoorKernelInterface
    pass_on: PassOn

    def is_elsewhere(self, message_start: bytes, byte_size: int) -> bool:
        """Whether a large message of this size, which begins so, is passed on."""
        return is_elsewhere(self.kernel, message_start, byte_size, streaming=False)

    def helper_job(
        self, call: Any, message: ReceivedMessage, received_in: ReceiveBuffer | None
    ) -> tuple[Request, HelperJob]:
        _no_helper(message)
        return super().helper_job(call, message, received_in)


class DoorStreams(MessageIntake):
    """The streaming inference RPC of a door."""

    kernel: DoorKernelInterface

    def helper_job(
        self, call: Any, message: ReceivedMessage, received_in: ReceiveBuffer | None
    ) -> tuple[Request, HelperJob]:
        _no_helper(message)
        return super().helper_job(call, message, received_in)


def is_elsewhere(kernel: DoorKernelInterface, message_start: bytes, byte_size: int, *, streaming: bool) -> bool:
    """Whether the kernel serves a request whose large message has these first bytes, none for a compressed one."""
    target = model_of(message_start) if message_start else None
    if target is None:
        return True
    try:
        route = kernel.route(*target) if streaming else kernel.unary_route(*target, ENTRY_POINT)
    except ServingError:
        return True
    return not kernel.has_room_for(route, byte_size)


class DoorInferCall(InferCall, eq=False):
    """One unary call of a door: served here, or passed on as soon as it is known that the kernel serves it."""

    _relayed: RelayedCall | None = None
    #: While it is being submitted.
    _message: Any = None

    def expect(self) -> None:
        super().expect()
        if self._stream.complete_message is None:
            reader = cast("PassingReader", self._stream.message_reader)
            reader.elsewhere, reader.on_raw = self._is_elsewhere, self._pass_raw

    def complete(self, message: bytes | None) -> None:  # type: ignore[override]  # as `StreamCallbacks` has it
        self._message = message
        take(self, message)
        self._message = None

    def readable(self) -> None:
        if self._relayed is not None:
            self._relayed.readable()
            return
        super().readable()
        self._message = None

    def data_sent(self) -> None:
        if self._relayed is not None:
            self._relayed.data_sent()

    def closed(self) -> None:
        if self._relayed is not None:
            self._relayed.closed()
        super().closed()

    def terminate(self) -> None:
        if self._relayed is not None:
            self._relayed.terminate()
        else:
            super().terminate()

    def refused(self, error: Exception) -> None:
        if isinstance(error, ServedElsewhere) and self._message is not None:
            self._pass_message(self._message)
        else:
            super().refused(error)

    def _take_message(self) -> ReceivedMessage | None:
        self._message = super()._take_message()
        return cast("ReceivedMessage | None", self._message)

    def _is_elsewhere(self, message_start: bytes, byte_size: int) -> bool:
        if self._buffer is not None or self._stream.message_reader.messages:
            return False  # a second message, which is refused
        return cast("DoorInference", self.intake).is_elsewhere(message_start, byte_size)

    def _pass_message(self, message: ReceivedMessage) -> None:
        """Pass the call on with its only message, which has come."""
        self._stream.complete_message = None
        buffer, self._buffer = self._buffer, None
        content = message.content if isinstance(message, CompressedMessage) else cast("bytes", message)
        prefix = PREFIX.pack(isinstance(message, CompressedMessage), len(content))
        release = None if buffer is None else buffer.release
        relayed = self._pass()
        if relayed is not None:
            relayed.begin(self._stream.request_head.fields, (prefix, content), release)
        elif release is not None:
            release()

    def _pass_raw(self) -> None:
        """Pass the call on, of which the reader keeps all bytes."""
        if self._relayed is not None:
            self._relayed.pump()
        elif self._stream.is_open and (relayed := self._pass()) is not None:
            relayed.begin(self._stream.request_head.fields)

    def _pass(self) -> RelayedCall | None:
        self.request = None
        if self._deadline is not None:
            self._deadline.cancel()  # the kernel has it, too
        self._relayed = cast("DoorInference", self.intake).pass_on(self._connection, self._stream)
        return self._relayed


class DoorStreamCall(StreamCall):
    """One ModelStreamInfer call of a door. It ends without a status where the kernel serves the rest of the stream."""

    def __init__(
        self, kernel: DoorKernelInterface, reader: PassingReader, *arguments: Any, max_response_pool_size: int | None
    ) -> None:
        """`reader` is that of the stream."""
        super().__init__(*arguments, max_response_pool_size=max_response_pool_size)
        self._kernel = kernel
        self._reader = reader
        #: The message that is being submitted.
        self._current: ReceivedMessage | None = None
        #: The first bytes that the kernel gets; None while the door serves the stream.
        self.rest: RawPart | None = None

    def _submit(self, message: ReceivedMessage) -> None:
        if isinstance(message, RawPart):
            self._end_here(message)
            return
        self._current = message
        super()._submit(message)
        self._current = None

    def refused(self, opened: StreamRequest, error: Exception) -> None:
        message = self._current
        if not isinstance(error, ServedElsewhere) or message is None:
            super().refused(opened, error)
            return
        opened.submitting = False  # it does not begin
        target = opened.names.model_name, opened.names.model_version
        if not target[0] or self._kernel.knows(*target):
            del self._open_requests[opened]
            self._end_here(raw_message(message))
            return
        self._decoding = opened  # nothing is read before the kernel has said what the model is
        kept = message if isinstance(message, bytes) else raw_message(message)
        self._kernel.on_route_reply(*target, functools.partial(self._route_replied, opened, target, kept))

    def _route_replied(self, opened: StreamRequest, target: tuple[str, str], message: bytes) -> None:
        if self._ended.done():
            return
        del self._open_requests[opened]
        self._decoding = None
        if self._kernel.knows(*target):
            self._submit(message)  # a raw one ends the stream here
        else:
            self._end_here(raw_message(message))
        self._read()

    def _end_here(self, rest: RawPart) -> None:
        """Read no more: when all requests have their responses, the kernel gets the stream from `rest` on."""
        self.rest = rest
        self._reads = False
        self._reader.pass_on()  # a message that has come in part is still where it belongs
        self._end_if_done()


class _DoorStream:
    """A stream of a door: served by a handler, and then perhaps passed on. A `StreamCallbacks`."""

    def __init__(self, handler: HandlerCall, connection: ServerConnection, stream: Stream, pass_on: PassOn) -> None:
        self._handler = handler
        self._connection = connection
        self._stream = stream
        self._pass_on = pass_on
        self._relayed: RelayedCall | None = None
        self._begin_s = asyncio.get_running_loop().time()

    @property
    def reader(self) -> PassingReader:
        return cast("PassingReader", self._stream.message_reader)

    @property
    def _call(self) -> StreamCallbacks:
        return self._relayed or self._handler

    def complete(self, message: bytes | None) -> None:
        self._call.complete(message)

    def readable(self) -> None:
        self._call.readable()

    def data_sent(self) -> None:
        self._call.data_sent()

    def closed(self) -> None:
        self._call.closed()

    def terminate(self) -> None:
        self._call.terminate()

    def move(self, rest: RawPart) -> None:
        """Pass on what follows, from `rest` on."""
        self._handler.leave()
        stream = self._stream
        if not stream.is_open:
            return
        self._relayed = self._pass_on(self._connection, stream)
        if self._relayed is not None:
            self.reader.on_raw = self._relayed.pump
            self._relayed.begin(self._fields(), (rest,))

    def _fields(self) -> Fields:
        """Return the headers of the call with the time that is left."""
        head = self._stream.request_head
        if head.timeout_s is None:
            return head.fields
        left_s = max(0.0, head.timeout_s - (asyncio.get_running_loop().time() - self._begin_s))
        milliseconds = max(1, round(left_s * 1000))
        text = f"{milliseconds}m" if milliseconds <= _MOST_TIMEOUT else f"{min(_MOST_TIMEOUT, round(left_s))}S"
        return [*(each for each in head.fields if each[0] != "grpc-timeout"), ("grpc-timeout", text)]


class DoorListener(GrpcListener):
    """The connections of a door."""

    infer_call = DoorInferCall

    def __init__(self, kernel: DoorKernelInterface, settings: GrpcDoorSettings) -> None:
        restricted = {} if settings.restriction is None else {Category.INFERENCE: settings.restriction}
        restrictions = Restrictions(restricted)
        options = ListenerOptions(
            None, settings.keepalive, Admission(restrictions) if restrictions else None, settings.log_access
        )
        self.calls = OpenCalls()
        messages = message_budget()
        forwarder = make_metadata_forwarder(settings.header_forward_pattern)
        compression = make_compression(settings.compression_level)
        inference = DoorInference(kernel, self.calls, forwarder, compression)
        inference.messages, inference.pass_on = messages, self._pass_on
        self._streams = DoorStreams(kernel, forwarder, streaming=True)
        self._streams.messages = messages
        handler = Handler(
            self._model_stream_infer, Cardinality.STREAM_STREAM, pb.ModelInferRequest, pb.ModelStreamInferResponse
        )
        handlers = Handlers({MODEL_STREAM_INFER: handler}, compression, frozenset({MODEL_STREAM_INFER}))
        super().__init__(None, options, inference, handlers)
        self._kernel = kernel
        self._max_response_pool_size = settings.max_response_pool_size
        #: The streams that the door serves, by what their handler has of them.
        self._open_streams: dict[object, _DoorStream] = {}
        #: By the transport of the client's connection.
        self._relays: dict[asyncio.Transport, Relay] = {}
        self._connecting = BackgroundTasks()

    async def _model_stream_infer(self, stream: GrpcStream[pb.ModelInferRequest, pb.ModelStreamInferResponse]) -> None:
        with translated_errors("ModelStreamInfer"):
            self.calls.check_accepting()
            opened = self._open_streams.pop(stream_of(stream))
            call = DoorStreamCall(
                self._kernel, opened.reader, self._streams, stream,
                max_response_pool_size=self._max_response_pool_size,
            )  # fmt: skip
            with self.calls.stoppable(call):
                await call.run()
            if call.rest is not None:
                opened.move(call.rest)
                raise asyncio.CancelledError  # the handler ends without a status

    # ---- protocols.grpc.h2.transport.CallAcceptor ----------------------------------------------------

    def connection_closed(self, connection: ServerConnection) -> None:
        relay = self._relays.pop(connection.transport, None)
        if relay is not None:
            relay.close()
        super().connection_closed(connection)

    def accept_call(self, connection: ServerConnection, stream: Stream) -> StreamCallbacks | None:
        head = stream.request_head
        if head.is_grpc and head.path == MODEL_INFER:
            if stream.complete_message is None:
                stream.read_by(PassingReader)
            return super().accept_call(connection, stream)
        stream.read_by(PassingReader)
        reader = cast("PassingReader", stream.message_reader)
        if not head.is_grpc or head.path != MODEL_STREAM_INFER:
            reader.pass_on()
            relayed = self._pass_on(connection, stream)
            if relayed is None:
                return None
            reader.on_raw = relayed.pump
            return relayed.begin(head.fields)
        reader.elsewhere = functools.partial(is_elsewhere, self._kernel, streaming=True)
        handler = super().accept_call(connection, stream)
        if not isinstance(handler, HandlerCall):
            return handler
        opened = self._open_streams[handler] = _DoorStream(handler, connection, stream, self._pass_on)
        assert handler.task is not None, "a handler was started"
        handler.task.add_done_callback(lambda _: self._open_streams.pop(handler, None))
        return opened

    # ---- calls that are passed on ----------------------------------------------------------------

    def _pass_on(self, connection: ServerConnection, stream: Stream) -> RelayedCall | None:
        """Return a call that is passed on when it begins. Where that is not possible, the client gets a status."""
        relay = self._relays.get(connection.transport)
        if relay is None or relay.ended:
            try:
                relay = self._relays[connection.transport] = self._connect(connection)
            except ServingError as error:
                failure = grpc_error(error, stream.request_head.path)
                trailers = status_trailers(failure.status.value, failure.message)
            except OSError as error:
                trailers = status_trailers(Status.UNAVAILABLE.value, f"{LOST}: {error.strerror}")
            else:
                return RelayedCall(relay, connection, stream)
            connection.sending.send_trailers(stream, trailers)
            connection.schedule_write()
            return None
        return RelayedCall(relay, connection, stream)

    def _connect(self, connection: ServerConnection) -> Relay:
        """Return a new connection to the kernel for calls of a client. Raises `OSError`, and `ServingError`."""
        sock = self._kernel.open_calls(connection.transport.get_extra_info("peername"), connection.peer.identity)
        relay = Relay(self._kernel.budget)
        self._connecting.start(_connect(relay, sock))
        return relay


async def _connect(relay: Relay, sock: socket.socket) -> None:
    await adopt(sock, lambda: relay)
    if not relay.connected:
        relay.lose()


class DoorConnections:
    """The connections of a door, for its process."""

    def __init__(self, kernel: DoorKernelInterface, settings: GrpcDoorSettings) -> None:
        self._listener = DoorListener(kernel, settings)
        self._listener.open()
        #: The calls of `adopt` that run.
        self._adopting: set[asyncio.Task[None]] = set()

    @property
    def connection_count(self) -> int:
        return self._listener.connection_count

    async def adopt(self, sock: socket.socket, received: bytes, passes: int) -> None:
        """Serve a connection of a client from now on. It comes before its first byte."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._adopting.add(task)
        try:
            await adopt(sock, self._listener.make_connection)
        finally:
            self._adopting.discard(task)

    async def close(self, grace_s: float) -> None:
        """Close connections when their calls have ended, or `grace_s` seconds are over."""
        if self._adopting:  # connections that came before
            await asyncio.wait(self._adopting, timeout=_ADOPTION_S)
        await self._listener.stop(self._listener.calls, grace_s)


def open_connections(kernel: DoorKernelInterface, settings: bytes) -> DoorConnections:
    """Return what serves the connections of a door. `settings` are those of `protocols.grpc.server.door_settings`."""
    return DoorConnections(kernel, msgspec.msgpack.decode(settings, type=GrpcDoorSettings))
