"""ModelInfer: one request and one response, without a task: from the message to the kernel in one call.

The response is encoded when the kernel sends it. What ends the call before, its client, its deadline or the stop of
the server, cancels the request.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import TYPE_CHECKING

import msgspec
from grpclib.const import Status

from kernel.errors import InternalError, ServingError
from kernel.records.front_doors import GRPC, Reception, at_iteration_end
from protocols.forwarding import last_value
from protocols.grpc.codec import response_parts
from protocols.grpc.h2.headers import RETRY_LATER, status_trailers
from protocols.grpc.h2.states import StreamState
from protocols.grpc.handlers import CALL_TERMINATED
from protocols.grpc.intake import MessageIntake
from protocols.grpc.rpc import grpc_error
from protocols.intake import OnlyResponse, take
from protocols.status import may_retry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.serving.interface import KernelInterface
    from kernel.serving.request import Request
    from kernel.serving.response import Response
    from protocols.grpc.compression import ResponseCompression
    from protocols.grpc.framing import ReceivedMessage
    from protocols.grpc.h2.headers import RequestHead
    from protocols.grpc.h2.streams import Stream
    from protocols.grpc.h2.transport import ServerConnection
    from protocols.grpc.intake import MetadataForwarder
    from protocols.grpc.rpc import OpenCalls
    from protocols.large_requests import RequestTask

# A name of this module is found faster than a member of an enum (states.py).
_CLOSED = StreamState.CLOSED


class Inference(MessageIntake):
    """The unary inference RPC: what its calls share."""

    def __init__(
        self,
        kernel: KernelInterface,
        calls: OpenCalls,
        forwarder: MetadataForwarder | None = None,
        compression: ResponseCompression | None = None,
    ) -> None:
        """Without `forwarder` no metadata is forwarded, without `compression` no response is compressed."""
        super().__init__(kernel, forwarder, streaming=False)
        self.compression = compression
        calls.add_intake(self)


class InferCall(msgspec.Struct, eq=False):
    """One call: takes its message from the stream, and its response from the kernel as the request's sink."""

    intake: Inference
    _connection: ServerConnection
    _stream: Stream
    #: The head says nothing about the message.
    head: None = None
    #: The request, until it has its response.
    request: Request | None = None
    #: As in `protocols.intake.IntakeCall`.
    decoded: object = None
    decoding: RequestTask | None = None
    request_id: str = ""
    #: Made where the response is not a single one with the final flag.
    _only: OnlyResponse | None = None
    _deadline: asyncio.TimerHandle | None = None
    deadline_ns: int = 0
    #: The memory that a large message is received in.
    _buffer: ReceiveBuffer | None = None
    #: When the call and its message came, in monotonic nanoseconds; 0 unless requests are traced. The second one
    #: is also 0 if both came together.
    _begin_ns: int = 0
    _received_ns: int = 0

    def expect(self) -> None:
        """Start the deadline of the call, if it has one, and get ready for its message, if it is still to arrive."""
        if self.intake.kernel.takes_times:
            self._begin_ns = self._connection.last_received_ns
        timeout_s = self._stream.request_head.timeout_s
        if timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._expire)
            self.deadline_ns = monotonic_ns() + round(timeout_s * 1e9)
        if self._stream.complete_message is None:
            self._stream.message_reader.choose_buffer = self._choose_buffer

    # ---- protocols.grpc.h2.streams.StreamCallbacks -------------------------------------------------------

    #: Nearly every call comes complete.
    complete = take

    def readable(self) -> None:
        """Take the request, once all of it has arrived, or respond what is wrong with it."""
        if self.request is not None:
            return
        message = self._take_message()
        if message is None:
            return
        begin_ns = self._begin_ns
        if begin_ns and begin_ns != (received_ns := self._connection.last_received_ns):
            self._received_ns = received_ns
        try:
            take(self, message, self._buffer)
        finally:
            if self._buffer is not None:
                self._release_buffer()

    def data_sent(self) -> None:
        """The end of the response ends the call."""

    def closed(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._release_buffer()
        self._cancel()

    def terminate(self) -> None:
        if not self._stream.headers_sent:  # a response that is being sent gets no second status
            self._give_up(Status.UNAVAILABLE, CALL_TERMINATED)

    def _expire(self) -> None:
        if self._stream.is_open:
            self._give_up(Status.DEADLINE_EXCEEDED, None)

    def _give_up(self, status: Status, text: str | None) -> None:
        """Respond in place of the model."""
        self._fail(status, text)
        self._cancel()

    def _cancel(self) -> None:
        """The response is not wanted any more."""
        if self.decoding is not None:
            self.decoding.cancel()
            # They refer to this call: such a cycle keeps the message until garbage is collected.
            self.decoding = self.request = None
        elif self.request is not None:
            self.intake.kernel.cancel(self.request)

    # ---- the request ---------------------------------------------------------------------------

    def _take_message(self) -> ReceivedMessage | None:
        """Return the message, None as long as it is not complete, or where the call has failed."""
        reader = self._stream.message_reader
        if reader.fault is not None:
            self._fail(reader.fault.status, reader.fault.text)
        elif len(reader.messages) > 1:
            self._fail(Status.INTERNAL, "more than one request message")
        elif self._stream.request_ended:
            if reader.messages:
                return reader.take()
            self._fail(Status.UNIMPLEMENTED, "the call ended without a request message")
        return None

    def _choose_buffer(self, message_start: bytes, byte_size: int) -> memoryview:
        """Return memory for a large message. Raises `ServingError`, also for a second message."""
        if self._buffer is not None:
            raise InternalError("more than one request message")
        self._buffer = self.intake.receive_buffer(message_start, byte_size)
        return self._buffer.view

    def _release_buffer(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.release()

    # ---- protocols.intake.IntakeCall ----------------------------------------------------------

    @property
    def explain(self) -> bool:
        return False  # it is a parameter

    @property
    def request_head(self) -> RequestHead:
        return self._stream.request_head

    def refused(self, error: Exception) -> None:
        self.request = None
        self._fail_with(error)

    def decoded_by_helper(self) -> None:
        """No other message follows."""

    # ---- kernel.serving.response.Sink ------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self._connection.peer.identity

    def header(self, name: str) -> str:
        return last_value(self._stream.request_head.fields, name)

    def reception(self) -> Reception:
        """Return when the request came, for traces and records: as `kernel.records.front_doors.FrontDoorSink` says."""
        sending, compression = self._connection.sending, self.intake.compression
        if compression is None and self._stream.state is not _CLOSED and self._only is None and not sending.ended:
            # Usually `send` has something written at the end of the iteration, and nothing else is to be done.
            return GRPC, self._begin_ns, self._received_ns, sending.releases.append
        # Compression may take a helper, and so longer.
        return GRPC, self._begin_ns, self._received_ns, self._when_sent if compression is None else at_iteration_end

    def _when_sent(self, callback: Callable[[], None]) -> None:
        """Call `callback` when all output until now is written; see `kernel.records.front_doors.WhenSent`."""
        sending = self._connection.sending
        if sending.ended:  # nothing is written any more
            callback()
            return
        sending.releases.append(callback)
        if not sending.write_queue.byte_size:  # nobody wanted the response, so that no write is scheduled
            self._connection.schedule_write()

    def send(self, response: Response) -> None:
        if self._only is not None or response.outputs is None or not response.final:  # unusual
            only = self._collect(response)
            if only is None:
                return
            response = only
        self.request = None  # it refers to this call as its sink
        if self._stream.state is _CLOSED:
            response.release()
            return
        try:
            if response.error is not None:
                raise response.error
            parts = response_parts(response)
        except Exception as error:
            response.release()
            self._fail_with(error)
            return
        if self._deadline is not None:
            self._deadline.cancel()
        compression = self.intake.compression
        if compression is not None:
            compression.respond(self._connection, self._stream, parts, response.release)
            return
        release = None if response.leased is False else response.release
        self._connection.sending.respond(self._stream, parts, release)
        self._connection.write_soon()

    def _collect(self, response: Response) -> Response | None:
        """Take one of several responses; returns the one to send when the last has arrived."""
        if self._only is None:
            self._only = OnlyResponse()
        if not self._only.add(response):
            return None
        self.request = None
        try:
            return self._only.take()
        except InternalError as error:
            if self._stream.is_open:
                self._fail_with(error)
            return None

    # ---- failures ------------------------------------------------------------------------------

    def _fail_with(self, error: Exception) -> None:
        failure = grpc_error(error, "ModelInfer")
        self._fail(
            failure.status, failure.message, RETRY_LATER if isinstance(error, ServingError) and may_retry(error) else ()
        )

    def _fail(self, status: Status, text: str | None, more: Sequence[tuple[str, str]] = ()) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stream.is_open:
            self._connection.sending.send_trailers(self._stream, status_trailers(status.value, text, more))
            self._connection.schedule_write()
