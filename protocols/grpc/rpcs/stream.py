"""ModelStreamInfer: any number of requests, which overlap, and their responses on one stream.

Semantics are Triton's (stream_infer_handler.cc). The response to a request that fails is an `error_message`, and the
stream continues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, cast

from google.protobuf.message import DecodeError

from kernel.errors import InternalError, NoMemory, ServingError
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.tracing.explanation import take_explain
from protocols.grpc.grpclib_internals import stream_of
from protocols.grpc.messages.codec import decode_request, parse_soon, start_request
from protocols.grpc.messages.message_task import message_task
from protocols.grpc.messages.prepared import names_at_start
from protocols.grpc.messages.receive_buffers import receive_buffer_for
from protocols.grpc.open_calls import ServerShuttingDown
from protocols.grpc.rpc import grpc_error
from protocols.grpc.rpcs.response_order import RequestOrder
from protocols.grpc.rpcs.stream_messages import (
    MAX_OPEN_REQUESTS,
    MAX_UNANSWERED_REQUESTS,
    MESSAGES_PER_ITERATION,
    EncodedStreamResponse,
    OpenRequest,
    PreparingOnStream,
    StreamRequestSink,
    encode_for_stream,
)
from protocols.grpc.special_messages import CompressedMessage, RefusedMessage

if TYPE_CHECKING:
    from grpclib.server import Stream

    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest, ModelStreamInferResponse
    from protocols.grpc.handlers import HandlerCall
    from protocols.grpc.messages.prepared import PreparedMessages
    from protocols.grpc.metadata import MetadataForwarder
    from protocols.grpc.special_messages import ReceivedMessage
    from protocols.helpers.request_task import RequestTask


class StreamCall:
    """One ModelStreamInfer call. Its messages are handled in callbacks: a task for each of them costs more."""

    def __init__(
        self,
        kernel: Kernel,
        stream: Stream[ModelInferRequest, ModelStreamInferResponse],
        prepared: PreparedMessages,
        forwarder: MetadataForwarder | None = None,
        *,
        max_response_pool_size: int | None = None,
    ) -> None:
        """`prepared` is shared by all streams. No requests are read while `max_response_pool_size` responses wait for
        the client."""
        self._kernel = kernel
        self._stream = stream
        #: grpclib's stream parses each message and copies each response: they do not pass through it.
        self.call = cast("HandlerCall", stream_of(stream))
        self._prepared = prepared
        #: Buffers with messages that were not submitted yet, oldest first.
        self._buffers: deque[ReceiveBuffer] = deque()
        self._forwarder = forwarder
        self._max_response_pool_size = max_response_pool_size
        #: Whether the first error of a response ends the stream with its status (Triton: metadata as the
        #: stream starts).
        assert stream.metadata is not None, "grpclib sets it before the call begins"
        self._fails_on_error = stream.metadata.get("triton_grpc_error") == "true"
        self._open_requests: dict[Request, OpenRequest] = {}
        self._order: RequestOrder[Request, EncodedStreamResponse] = RequestOrder()
        #: Responses of the kernel, and encoded ones that are to be sent, both in order.
        self._responses: deque[tuple[Request, Response]] = deque()
        self._encoded: deque[EncodedStreamResponse] = deque()
        #: The response that has not left: the next one waits for `_message_sent`.
        self._leaving: EncodedStreamResponse | None = None
        self._sending_headers: asyncio.Task[None] | None = None
        self._headers_sent = False
        #: Whether more requests are accepted, and whether one is being submitted now.
        self._reads = True
        self._submitting = False
        #: Whether `_read_on` will be called.
        self._reads_later = False
        #: Decodes a request in a helper. No more messages are taken before it is submitted.
        self._task: RequestTask | None = None
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
            await self._ended
        finally:
            self._ended.cancel()  # responses that are still to come are released
            if self._task is not None:
                self._task.cancel()
            self._release()
            self._kernel.cancel(*self._open_requests)
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

    def _end_if_done(self) -> None:
        if not self._reads and not self._open_requests and not self._ended.done():
            self._ended.set_result(None)

    def _release(self) -> None:
        """Release what will not be sent."""
        if self._sending_headers is not None:
            self._sending_headers.cancel()
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
            for _ in range(MESSAGES_PER_ITERATION):
                if (
                    not self._reads
                    or self._reads_later
                    or self._task is not None
                    or len(self._open_requests) >= MAX_UNANSWERED_REQUESTS
                    or (self._leaving is not None and self._backed_up)
                    or self._ended.done()
                ):
                    return
                message = self.call.take_message()
                if message is not None:
                    self._submit(message)
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
        buffer = receive_buffer_for(self._kernel, message_start, byte_size, streaming=True)
        self._buffers.append(buffer)
        return buffer.view

    def _submit(self, message: ReceivedMessage) -> None:
        content = message.content if isinstance(message, CompressedMessage) else message
        received_in = self._buffers[0] if self._buffers and self._buffers[0].view is content else None
        self._submitting = True
        try:
            self._start(message, received_in)
        finally:
            self._submitting = False
            if received_in is not None:
                self._buffers.popleft().release()
        if self._responses:
            self._write()

    def _start(self, message: ReceivedMessage, received_in: ReceiveBuffer | None) -> None:
        """Give the request in `message` to the kernel, or respond why it is refused."""
        kernel = self._kernel
        sink = StreamRequestSink(self)
        if kernel.takes_times:
            sink.begin_ns = monotonic_ns()
        if isinstance(message, (CompressedMessage, RefusedMessage)) or not (
            received_in is None or received_in.of_model
        ):
            self._decode_in_helper(message, received_in, sink)
            return
        matched = self._prepared.match(message, kernel.catalog.generation, sink)
        if matched is not None:
            request, known = matched
            opened = OpenRequest(True, known.wants_empty_final)
        else:
            try:
                found = parse_soon(message)
            except DecodeError as error:
                raise grpc_error(error, "") from None
            if found is None:
                self._decode_in_helper(message, received_in, sink)
                return
            parsed, raw_contents = found
            request, opened = start_request(parsed, sink, streaming=True), OpenRequest()
        sink.request = request
        self._open_requests[request] = opened
        try:
            forwarded = self._forwarder.of_stream(self._stream) if self._forwarder is not None else None
            if matched is not None:
                opened.ordered = not known.prepared.model.spec.decoupled
                if forwarded:
                    request.parameters = {**request.parameters, **forwarded}
                kernel.submit(request, known.prepared, received_in)
            else:
                opened.ordered = not kernel.resolve(request.model_name, request.model_version).spec.decoupled
                opened.wants_empty_final = decode_request(parsed, request, raw_contents)
                request.explain = take_explain(request)

                def keep(checked: Request, model: Model) -> None:
                    self._prepared.add(message, checked, model, wants_empty_final=opened.wants_empty_final)
                    if forwarded:
                        checked.parameters = {**checked.parameters, **forwarded}

                kernel.submit(request, None, received_in, keep)
            # A request that a scheduler does not queue is refused as well.
            opened.refused = request.failed and not request.dispatched
        except ServingError as error:
            self._refuse(request, opened, error)
        if opened.ordered:
            self._order.begin(request)

    def _refuse(self, request: Request, opened: OpenRequest, error: ServingError) -> None:
        """Respond why a request is refused."""
        opened.refused = True
        self._responses.append((request, Response(request.model_name, request.model_version, request.id, error=error)))

    def _decode_in_helper(
        self, message: ReceivedMessage, received_in: ReceiveBuffer | None, sink: StreamRequestSink
    ) -> None:
        """Have a helper decode `message`, or respond why it is refused."""
        request, opened = Request("", [], sink, streaming=True), OpenRequest()
        sink.request = request
        self._open_requests[request] = opened
        try:
            if isinstance(message, RefusedMessage):
                request.model_name, request.model_version, request.id = names_at_start(message.start)
            caller = PreparingOnStream(self, request, opened)
            self._task = message_task(self._kernel, request, caller, message, received_in)
            self._task.start()
        except ServingError as error:
            self._task = None
            self._refuse(request, opened, error)
            self._order.begin(request)

    def request_prepared(self, request: Request, opened: OpenRequest, response_options: bytes) -> None:
        """Submit the request that a helper has decoded, and take more messages."""
        self._task = None
        opened.wants_empty_final = bool(response_options)
        request.explain = take_explain(request)
        self._submitting = True
        try:
            opened.ordered = not self._kernel.resolve(request.model_name, request.model_version).spec.decoupled
            forwarded = self._forwarder.of_stream(self._stream) if self._forwarder is not None else None
            if forwarded:
                request.parameters = {**request.parameters, **forwarded}
            self._kernel.submit(request, admitted=True)
            opened.refused = request.failed and not request.dispatched
        except ServingError as error:
            request.release_leases()
            self._refuse(request, opened, error)
        finally:
            self._submitting = False
        if opened.ordered:
            self._order.begin(request)
        self._continue_stream()

    def request_refused(self, request: Request, opened: OpenRequest, error: ServingError) -> None:
        """Respond why a request that a helper should decode is refused, and take more messages."""
        self._task = None
        if type(error) in (InternalError, NoMemory) and error.before_queueing:  # the message is broken
            self._fail(error)
            return
        self._refuse(request, opened, error)
        self._order.begin(request)
        self._continue_stream()

    def _continue_stream(self) -> None:
        if self._responses:
            self._write()
        self._read()

    # ---- responses ---------------------------------------------------------------------------

    def put(self, request: Request, response: Response) -> None:
        """Send a response of `request`, after those that come before it."""
        if self._ended.done():
            response.release()
            return
        self._responses.append((request, response))
        if self._leaving is None and not self._submitting:
            self._write()

    def _message_sent(self) -> None:
        """The response that had to wait has left."""
        encoded, self._leaving = self._leaving, None
        if encoded is not None and not self._ended.done():
            self._finish(encoded)
            self._write()
            self._read()

    def _write(self) -> None:
        """Send responses as far as the client's windows allow."""
        try:
            while self._leaving is None and not self._ended.done():
                if self._encoded:
                    self._send(self._encoded.popleft())
                elif self._responses:
                    self._encode_next()
                else:
                    return
        except Exception as error:
            self._fail(error)

    def _encode_next(self) -> None:
        """Encode the next response, and put what may be sent now into `_encoded`."""
        request, response = self._responses.popleft()
        if not response.final:
            request.consumed()
        opened = self._open_requests[request]
        if response.error is not None and self._fails_on_error and not opened.refused:
            raise response.error
        encoded = encode_for_stream(request, opened, response)
        if opened.ordered:
            self._encoded += self._order.put(request, encoded, final=encoded.final)
        else:
            self._encoded.append(encoded)

    def _send(self, encoded: EncodedStreamResponse) -> None:
        if not encoded.parts:
            if encoded.release is not None:
                encoded.release()
            self._finish(encoded)
        elif not self._headers_sent:
            self._leaving = encoded
            self._sending_headers = asyncio.get_running_loop().create_task(self._send_headers())
        elif self.call.send_message_nowait(encoded.parts, encoded.release):
            self._finish(encoded)
        else:
            self._leaving = encoded

    async def _send_headers(self) -> None:
        """Send the headers of the stream's response, and after them the message that waits in `_leaving`."""
        try:
            await self._stream.send_initial_metadata()
        except Exception as error:
            self._fail(error)
            return
        assert self._leaving is not None
        self._encoded.appendleft(self._leaving)
        self._leaving, self._headers_sent = None, True
        self._write()
        self._read()

    def _finish(self, encoded: EncodedStreamResponse) -> None:
        """The response has been sent."""
        if encoded.final:
            del self._open_requests[encoded.request]
            if not self._reads:
                self._end_if_done()
            elif len(self._open_requests) == MAX_UNANSWERED_REQUESTS - 1:
                self._read_later()
