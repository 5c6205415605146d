"""ModelStreamInfer: any number of requests, which overlap, and their responses on one stream.

Semantics are Triton's (stream_infer_handler.cc). A request that fails is answered by an `error_message`, and the
stream goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec
from google.protobuf.message import DecodeError

from kernel.errors import ServingError
from kernel.serving.response import Response
from protocols.grpc.calls import ServerShuttingDown
from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest, ModelStreamInferResponse
from protocols.grpc.grpclib_internals import stream_of
from protocols.grpc.messages.codec import (
    decode_request,
    encode_stream_end,
    encode_stream_error,
    parse_request,
    start_request,
    stream_response_parts,
)
from protocols.grpc.messages.receive_placement import place_for
from protocols.grpc.rpc import grpc_error
from protocols.grpc.rpcs.response_order import RequestOrder

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpclib.server import Stream

    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from protocols.grpc.handlers import HandlerCall
    from protocols.grpc.messages.prepared import PreparedMessages
    from protocols.grpc.metadata import MetadataForwarder
    from shm.tensor import Buffer

#: How many unanswered requests a stream may have while its client takes no replies.
READ_AHEAD = 256


class _Live(msgspec.Struct):
    """What the stream knows of a request that has had no final reply sent."""

    #: Whether its replies wait for those of older requests; not so for decoupled models.
    ordered: bool = True
    wants_empty_final: bool = False
    #: Whether it was refused at once, so that its error is not a response.
    refused: bool = False


class _Reply(msgspec.Struct):
    """What is to be sent for a response; without parts it only ends its request."""

    request: Request
    #: The bytes of a message, which may be memory of the response's worker until `release` is called.
    parts: list[Buffer]
    release: Callable[[], None] | None
    final: bool


class StreamCall:
    """One ModelStreamInfer call. Between its begin and its end it lives in callbacks: a task per message costs more."""

    def __init__(
        self,
        kernel: Kernel,
        stream: Stream[ModelInferRequest, ModelStreamInferResponse],
        forms: PreparedMessages,
        forwarder: MetadataForwarder | None = None,
        *,
        max_response_pool_size: int | None = None,
    ) -> None:
        """`forms` are those that streams have seen. No requests are read
        while `max_response_pool_size` responses wait for the client."""
        self._kernel = kernel
        self._stream = stream
        #: grpclib's stream parses each message and copies each reply: those go past it.
        self._wire = cast("HandlerCall", stream_of(stream))
        self._forms = forms
        #: What messages are received in that have not been submitted, oldest first.
        self._bodies: deque[ReceiveBuffer] = deque()
        self._forwarder = forwarder
        self._max_response_pool_size = max_response_pool_size
        #: Whether the first error of a response ends the stream with its status (Triton: metadata as the
        #: stream starts).
        assert stream.metadata is not None, "grpclib sets it before the call begins"
        self._fails_on_error = stream.metadata.get("triton_grpc_error") == "true"
        #: Requests that have had no final reply sent.
        self._live: dict[Request, _Live] = {}
        self._order: RequestOrder[Request, _Reply] = RequestOrder()
        #: Responses that nobody has taken, and replies made of those that were taken, both in order.
        self._responses: deque[tuple[Request, Response]] = deque()
        self._due: deque[_Reply] = deque()
        #: The reply that has not left: the next waits for `_sent`.
        self._leaving: _Reply | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._begun = False
        #: Whether requests are still taken, and whether one is being taken now.
        self._reads = True
        self._starting = False
        self._stopped = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until the client has sent its last request and each has its final reply.

        Raises `ServingError` or `GRPCError` for what ends the stream before. However it ends, requests
        that are still live are cancelled.
        """
        self._wire.attend(self._read, self._sent, self._place)
        self._read()
        try:
            await self._ended
        finally:
            self._ended.cancel()  # whatever still comes is released
            self._release()
            for request in self._live:
                self._kernel.cancel(request)
        if self._stopped:
            raise ServerShuttingDown

    def stop(self) -> None:
        """Read no more requests: the stream ends when those that it has are answered."""
        if self._reads:
            self._reads, self._stopped = False, True
            self._end_if_done()

    def _fail(self, error: Exception) -> None:
        """End the stream with `error`."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def _end_if_done(self) -> None:
        if not self._reads and not self._live and not self._ended.done():
            self._ended.set_result(None)

    def _release(self) -> None:
        """Give back what will not be sent."""
        if self._beginning is not None:
            self._beginning.cancel()
        if self._leaving is not None and not self._begun:
            self._due.append(self._leaving)
        while self._bodies:
            self._bodies.popleft().release()
        while self._responses:
            self._responses.popleft()[1].release()
        for reply in self._due:
            if reply.release is not None:
                reply.release()
        self._due.clear()

    # ---- requests ----------------------------------------------------------------------------

    def _read(self) -> None:
        """Take the messages that have come, as far as the client takes replies."""
        try:
            while self._reads and not (self._leaving is not None and self._backed_up) and not self._ended.done():
                message = self._wire.take_message()
                if message is not None:
                    self._submit(message)
                elif self._wire.at_end:
                    self._reads = False
                    self._end_if_done()
                else:
                    return
        except Exception as error:
            self._fail(error)

    @property
    def _backed_up(self) -> bool:
        """Whether a client that a reply waits for gets no further before it has taken that."""
        limit = self._max_response_pool_size
        return len(self._live) >= READ_AHEAD or (limit is not None and len(self._responses) >= limit)

    def _place(self, head: bytes, byte_size: int) -> memoryview | None:
        """Return memory of its model for a large message."""
        body = place_for(self._kernel, head, byte_size, streaming=True)
        if body is None:
            return None
        self._bodies.append(body)
        return body.view

    def _submit(self, message: Buffer) -> None:
        received_in = self._bodies[0] if self._bodies and self._bodies[0].view is message else None
        self._starting = True
        try:
            self._start(message, received_in)
        finally:
            self._starting = False
            if received_in is not None:
                self._bodies.popleft().release()
        if self._responses:
            self._write()

    def _start(self, message: Buffer, received_in: ReceiveBuffer | None) -> None:
        """Give the request in `message` to the kernel, or say on the stream why not."""
        kernel = self._kernel
        port = _Port(self)
        known = self._forms.find(message, kernel.catalog.generation, port)
        if known is not None:
            request, form = known
            live = _Live(True, form.wants_empty_final)
        else:
            try:
                parsed, raw_contents = parse_request(message)
            except DecodeError as error:
                raise grpc_error(error, "") from None
            request, live = start_request(parsed, port, streaming=True), _Live()
        port.request = request
        self._live[request] = live
        try:
            forwarded = self._forwarder.of_stream(self._stream) if self._forwarder is not None else None
            if known is not None:
                live.ordered = not form.common.model.spec.decoupled
                if forwarded:
                    request.parameters = {**request.parameters, **forwarded}
                kernel.submit(request, form.common, received_in)
            else:
                live.ordered = not kernel.resolve(request.model_name, request.model_version).spec.decoupled
                live.wants_empty_final = decode_request(parsed, request, raw_contents)

                def remember(checked: Request, model: Model) -> None:
                    self._forms.remember(message, checked, model, wants_empty_final=live.wants_empty_final)
                    if forwarded:
                        checked.parameters = {**checked.parameters, **forwarded}

                kernel.submit(request, None, received_in, remember)
            # What a scheduler does not even queue is refused as well.
            live.refused = request.failed and not request.dispatched
        except ServingError as error:
            live.refused = True
            refusal = Response(request.model_name, request.model_version, request.id, error=error)
            self._responses.append((request, refusal))
        if live.ordered:
            self._order.begin(request)

    # ---- replies -----------------------------------------------------------------------------

    def put(self, request: Request, response: Response) -> None:
        """Send a response of `request` when it is its turn."""
        if self._ended.done():
            response.release()
            return
        self._responses.append((request, response))
        if self._leaving is None and not self._starting:
            self._write()

    def _sent(self) -> None:
        """The reply that had to wait has left."""
        reply, self._leaving = self._leaving, None
        if reply is not None and not self._ended.done():
            self._finish(reply)
            self._write()
            self._read()

    def _write(self) -> None:
        """Send replies as far as the client takes them."""
        try:
            while self._leaving is None and not self._ended.done():
                if self._due:
                    self._send(self._due.popleft())
                elif self._responses:
                    self._take_response()
                else:
                    return
        except Exception as error:
            self._fail(error)

    def _take_response(self) -> None:
        """Make the next response a reply."""
        request, response = self._responses.popleft()
        if not response.final:
            request.consumed()
        live = self._live[request]
        if response.error is not None and self._fails_on_error and not live.refused:
            raise response.error
        reply = _reply(request, live, response)
        if live.ordered:
            self._due += self._order.put(request, reply, final=reply.final)
        else:
            self._due.append(reply)

    def _send(self, reply: _Reply) -> None:
        if not reply.parts:
            if reply.release is not None:
                reply.release()
            self._finish(reply)
        elif not self._begun:
            self._leaving = reply
            self._beginning = asyncio.get_running_loop().create_task(self._begin())
        elif self._wire.put_message(reply.parts, reply.release):
            self._finish(reply)
        else:
            self._leaving = reply

    async def _begin(self) -> None:
        """Send the headers of the answer, and behind them the first reply, which waits in `_leaving`."""
        try:
            await self._stream.send_initial_metadata()
        except Exception as error:
            self._fail(error)
            return
        assert self._leaving is not None
        self._due.appendleft(self._leaving)
        self._leaving, self._begun = None, True
        self._write()
        self._read()

    def _finish(self, reply: _Reply) -> None:
        """The reply has been sent."""
        if reply.final:
            del self._live[reply.request]
            if not self._reads:
                self._end_if_done()


class _Port(msgspec.Struct, eq=False):
    """The sink of one request, which is set before it is submitted."""

    call: StreamCall
    request: Request | None = None

    def send(self, response: Response) -> None:
        assert self.request is not None
        self.call.put(self.request, response)


def _reply(request: Request, live: _Live, response: Response) -> _Reply:
    """Return what is to be sent for a response, which is released with the reply."""
    release = None if response.leased is False else response.release
    try:
        if response.outputs is not None and response.error is None:
            return _Reply(request, stream_response_parts(response), release, response.final)
        error = response.error
    except ServingError as cannot:  # a response that gRPC cannot carry
        error = cannot
    message = ModelStreamInferResponse()
    if error is not None:
        # Of a request that was refused the client is told the id only.
        encode_stream_error(request, error.message, message, final=None if live.refused else response.final)
    elif response.final and live.wants_empty_final and not live.ordered:
        encode_stream_end(request, message)
    else:
        return _Reply(request, [], release, response.final)
    return _Reply(request, [message.SerializeToString()], release, response.final)
