"""ModelStreamInfer: any number of requests, which overlap, and their responses on one stream.

Semantics are Triton's (stream_infer_handler.cc). The response to a request that fails is an `error_message`, and the
stream continues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, cast

from kernel.errors import InternalError, NoMemory, ServingError
from kernel.serving.response import Response
from protocols.grpc.framing import CompressedMessage
from protocols.grpc.grpclib_internals import stream_of
from protocols.grpc.rpc import ServerShuttingDown
from protocols.grpc.rpcs.stream_messages import (
    MAX_OPEN_REQUESTS,
    MAX_UNANSWERED_REQUESTS,
    MESSAGES_PER_ITERATION,
    STEPS_PER_ITERATION,
    EncodedStreamResponse,
    RequestOrder,
    StreamRequest,
    encode_for_stream,
)

if TYPE_CHECKING:
    from grpclib.server import Stream

    from kernel.memory.input_placement import ReceiveBuffer
    from protocols.grpc.framing import ReceivedMessage
    from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest, ModelStreamInferResponse
    from protocols.grpc.handlers import HandlerCall
    from protocols.grpc.intake import MessageIntake


class StreamCall:
    """One ModelStreamInfer call. Its messages are handled in callbacks: a task for each of them costs more."""

    def __init__(
        self,
        intake: MessageIntake,
        stream: Stream[ModelInferRequest, ModelStreamInferResponse],
        *,
        max_response_pool_size: int | None = None,
    ) -> None:
        """`intake` is shared by all streams. No requests are read while `max_response_pool_size` responses wait for the
        client."""
        self._intake = intake
        self._stream = stream
        #: grpclib's stream parses each message and copies each response: they do not pass through it.
        self.call = cast("HandlerCall", stream_of(stream))
        #: Buffers with messages that were not submitted yet, oldest first.
        self._buffers: deque[ReceiveBuffer] = deque()
        self._max_response_pool_size = max_response_pool_size
        #: Whether the first error of a response ends the stream with its status (Triton: metadata as the
        #: stream starts).
        assert stream.metadata is not None, "grpclib sets it before the call begins"
        self._fails_on_error = stream.metadata.get("triton_grpc_error") == "true"
        self._open_requests: dict[StreamRequest, None] = {}
        self._order: RequestOrder[StreamRequest, EncodedStreamResponse] = RequestOrder()
        #: Responses of the kernel, and encoded ones that are to be sent, both in order.
        self._responses: deque[tuple[StreamRequest, Response]] = deque()
        self._encoded: deque[EncodedStreamResponse] = deque()
        #: The response that has not left: the next one waits for `_message_sent`.
        self._leaving: EncodedStreamResponse | None = None
        self._headers_sent = False
        #: Wakes `run`: the first response is to be sent, after the headers, or the stream has ended before.
        self._headers_due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Whether more requests are accepted.
        self._reads = True
        #: Whether `_read_on` will be called.
        self._reads_later = False
        #: Whether `_write_on` will be called.
        self._writes_later = False
        #: The request that a helper decodes. No more messages are taken before it is submitted.
        self._decoding: StreamRequest | None = None
        self._stopped = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the client has sent its last request and each has its final response.

        Raises `ServingError` or `GRPCError` for what ends the stream before. However it ends, requests that are still
        open are cancelled.
        """
        self.call.set_callbacks(self._read, self._message_sent, self._choose_buffer)
        self._read()
        try:
            await self._headers_due
            if not self._ended.done():
                await self._stream.send_initial_metadata()
                self._send_first()
            await self._ended
        finally:
            self._ended.cancel()  # responses that are still to come are released
            if (opened := self._decoding) is not None and opened.decoding is not None:
                opened.decoding.cancel()
                opened.decoding = opened.request = None  # they refer to it, in a cycle
            self._release()
            requests = [request for each in self._open_requests if (request := each.request) is not None]
            self._intake.kernel.cancel(*requests)
            for each in self._open_requests:
                each.forget_ended()
        if self._stopped:
            raise ServerShuttingDown

    def stop(self) -> None:
        """Read no more requests: the stream ends when those that it has got their final responses."""
        if self._reads:
            self._reads, self._stopped = False, True
            self._end_if_done()

    def _fail(self, error: Exception) -> None:
        """End the stream with `error`."""
        if not self._ended.done():
            self._ended.set_exception(error)
            self._wake()

    def _end_if_done(self) -> None:
        if not self._reads and not self._open_requests and not self._ended.done():
            self._ended.set_result(None)
            self._wake()

    def _wake(self) -> None:
        if not self._headers_due.done():
            self._headers_due.set_result(None)

    def _release(self) -> None:
        """Release what will not be sent."""
        if self._leaving is not None and not self._headers_sent:
            self._encoded.append(self._leaving)
        while self._buffers:
            self._buffers.popleft().release()
        while self._responses:
            self._responses.popleft()[1].release()
        for encoded in self._encoded:
            if encoded.release is not None:
                encoded.release()
        self._encoded.clear()

    # ---- requests ----------------------------------------------------------------------------

    def _read(self, later: bool = False) -> None:
        """Take the messages that have arrived, unless the client does not read its responses; `later` as it was to."""
        try:
            self._reads_later = self._reads_later and not later
            messages = self._intake.messages
            for _ in range(MESSAGES_PER_ITERATION):
                if (
                    not self._reads
                    or self._reads_later
                    or self._decoding is not None
                    or len(self._open_requests) >= MAX_UNANSWERED_REQUESTS
                    or (self._leaving is not None and self._backed_up)
                    or self._ended.done()
                ):
                    return
                message = self.call.take_message()
                if message is not None:
                    self._submit(message)
                    if messages is not None and not messages.room:  # it took long
                        break
                elif self.call.at_end:
                    self._reads = False
                    self._end_if_done()
                else:
                    return
            self._read_later()
        except Exception as error:
            self._fail(error)

    def _read_later(self) -> None:
        """Take more messages in the next event-loop iteration."""
        if not self._reads_later:
            self._reads_later = True
            asyncio.get_running_loop().call_soon(self._read, True)

    @property
    def _backed_up(self) -> bool:
        """Whether no more requests are read before the client reads the response that waits for it."""
        limit = self._max_response_pool_size
        return len(self._open_requests) >= MAX_OPEN_REQUESTS or (limit is not None and len(self._responses) >= limit)

    def _choose_buffer(self, message_start: bytes, byte_size: int) -> memoryview:
        """Return memory for a large message. Raises `ServingError`."""
        buffer = self._intake.receive_buffer(message_start, byte_size)
        self._buffers.append(buffer)
        return buffer.view

    def _submit(self, message: ReceivedMessage) -> None:
        content = message.content if isinstance(message, CompressedMessage) else message
        received_in = self._buffers[0] if self._buffers and self._buffers[0].view is content else None
        opened = StreamRequest(self._intake, self)
        if self._intake.kernel.takes_times:
            opened.begin_ns = monotonic_ns()
        self._open_requests[opened] = None
        try:
            opened.take(message, received_in)
        finally:
            if received_in is not None:
                self._buffers.popleft().release()
        if opened.decoding is not None:
            self._decoding = opened
        else:
            self._begun(opened)
        if self._responses:
            self._write()

    # ---- what the intake says of a request -----------------------------------------------------

    def refused(self, opened: StreamRequest, error: Exception) -> None:
        """Respond why a message is refused; one that is broken ends the stream."""
        if not isinstance(error, ServingError) or (
            self._decoding is opened and type(error) in (InternalError, NoMemory) and error.before_queueing
        ):
            self._fail(error)
            return
        opened.was_refused = True
        names = opened.names
        self._responses.append((opened, Response(names.model_name, names.model_version, names.id, error=error)))

    def decoded_by_helper(self, opened: StreamRequest) -> None:
        """A request that a helper has decoded was submitted or refused: take more messages."""
        self._decoding = None
        self._begun(opened)
        if not self._ended.done():
            self._write()
            self._read()

    def _begun(self, opened: StreamRequest) -> None:
        """A request was submitted or refused: its responses may be sent."""
        if opened.submitting:  # a helper that has responded at once has begun it already
            opened.submitting = False
            if opened.ordered:
                self._order.begin(opened)

    # ---- responses ---------------------------------------------------------------------------

    def put(self, opened: StreamRequest, response: Response) -> None:
        """Send a response, after those that come before it."""
        if self._ended.done():
            response.release()
            opened.forget_ended()
            return
        self._responses.append((opened, response))
        if self._leaving is None and not self._writes_later:
            self._write()

    def _message_sent(self) -> None:
        """The response that had to wait has left."""
        encoded, self._leaving = self._leaving, None
        if encoded is not None and not self._ended.done():
            self._finish(encoded)
            self._write()
            self._read()

    def _write(self) -> None:
        """Send responses as far as the client's windows allow, those beyond `STEPS_PER_ITERATION` later."""
        try:
            for _ in range(STEPS_PER_ITERATION):
                if self._leaving is not None or self._ended.done():
                    return
                if self._encoded:
                    self._send(self._encoded.popleft())
                elif self._responses and not self._responses[0][0].submitting:
                    self._encode_next()
                else:
                    return
        except Exception as error:
            self._fail(error)
            return
        if not self._writes_later:
            self._writes_later = True
            asyncio.get_running_loop().call_soon(self._write_on)

    def _write_on(self) -> None:
        """Send more responses, and read requests if that makes room for them."""
        self._writes_later = False
        self._write()
        self._read()

    def _encode_next(self) -> None:
        """Encode the next response, and put what may be sent now into `_encoded`."""
        opened, response = self._responses.popleft()
        if not response.final and opened.request is not None:
            opened.request.consumed()
        if response.error is not None and self._fails_on_error and not opened.was_refused:
            raise response.error
        encoded = encode_for_stream(opened, response)
        if opened.ordered:
            self._encoded += self._order.put(opened, encoded, final=encoded.final)
        else:
            self._encoded.append(encoded)

    def _send(self, encoded: EncodedStreamResponse) -> None:
        if not encoded.parts:
            if encoded.release is not None:
                encoded.release()
            self._finish(encoded)
        elif not self._headers_sent:
            self._leaving = encoded
            self._wake()
        elif self.call.send_message_nowait(encoded.parts, encoded.release):
            self._finish(encoded)
        else:
            self._leaving = encoded

    def _send_first(self) -> None:
        """The headers are sent: send the message that waits for them in `_leaving`."""
        assert self._leaving is not None
        self._encoded.appendleft(self._leaving)
        self._leaving, self._headers_sent = None, True
        self._write()
        self._read()

    def _finish(self, encoded: EncodedStreamResponse) -> None:
        """The response has been sent."""
        if encoded.final:
            del self._open_requests[encoded.opened]
            encoded.opened.forget_ended()
            if not self._reads:
                self._end_if_done()
            elif len(self._open_requests) == MAX_UNANSWERED_REQUESTS - 1:
                self._read_later()
