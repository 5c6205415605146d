"""ModelStreamInfer: any number of requests, which overlap, and their responses on one stream.

Semantics are Triton's (stream_infer_handler.cc). One task reads and submits, one writes; a request
that fails is answered by an `error_message`, and the stream goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, cast

import msgspec
from google.protobuf.message import DecodeError

from kernel.errors import ServingError
from kernel.response import Response
from protocols.grpc.calls import ServerShuttingDown
from protocols.grpc.codec import (
    decode_request,
    encode_stream_end,
    encode_stream_error,
    parse_request,
    start_request,
    stream_response_parts,
)
from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest, ModelStreamInferResponse
from protocols.grpc.order import RequestOrder
from protocols.grpc.placing import place_for
from protocols.grpc.rpc import grpc_error
from protocols.sinks import StreamSink

if TYPE_CHECKING:
    from collections.abc import Callable

    from grpclib.server import Stream

    from kernel.bodies import Body
    from kernel.request import Buffer, Request
    from kernel.router import Kernel
    from protocols.grpc.forms import RequestForms
    from protocols.grpc.handlers import HandlerCall
    from protocols.grpc.metadata import MetadataForwarder

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
    release: Callable[[], None]
    final: bool


class StreamCall:
    """One ModelStreamInfer call."""

    def __init__(
        self,
        kernel: Kernel,
        stream: Stream[ModelInferRequest, ModelStreamInferResponse],
        forms: RequestForms,
        forwarder: MetadataForwarder | None = None,
        *,
        max_response_pool_size: int | None = None,
    ) -> None:
        """`forms` are those that streams have seen. No requests are read
        while `max_response_pool_size` responses wait for the client."""
        self._kernel = kernel
        self._stream = stream
        #: grpclib's stream parses each message and copies each reply: those go past it.
        self._wire = cast("HandlerCall", stream._stream)
        self._wire.place_messages(self._place)
        self._headers_sent = False
        self._forms = forms
        #: What messages are received in that have not been submitted, oldest first.
        self._bodies: deque[Body] = deque()
        self._forwarder = forwarder
        self._max_response_pool_size = max_response_pool_size
        #: Whether the first error of a response ends the stream with its status (Triton: metadata as the
        #: stream starts).
        assert stream.metadata is not None, "grpclib sets it before the call begins"
        self._fails_on_error = stream.metadata.get("triton_grpc_error") == "true"
        self._sink = StreamSink()
        self._order: RequestOrder[Request, _Reply] = RequestOrder()
        self._live: dict[Request, _Live] = {}
        self._answered = asyncio.Event()
        self._answered.set()
        self._writable = asyncio.Event()
        self._writable.set()
        #: Set whenever a response was taken out of the sink.
        self._taken = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the client has sent its last request and each has its final reply.

        Raises `ServingError` or `GRPCError` for what ends the stream before. However it ends, requests
        that are still live are cancelled.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._reader = tasks.create_task(self._read())
                writer = tasks.create_task(self._write())
                await asyncio.wait((self._reader,))
                await self._answered.wait()
                writer.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._sink.close()
            while self._bodies:
                self._bodies.popleft().release()
            for request in self._live:
                self._kernel.cancel(request)
        if self._reader.cancelled():
            raise ServerShuttingDown

    def stop(self) -> None:
        """Read no more requests: the stream ends when those that it has are answered."""
        if self._reader is not None:
            self._reader.cancel()

    # ---- requests ----------------------------------------------------------------------------

    async def _read(self) -> None:
        limit = self._max_response_pool_size
        while (message := await self._wire.next_message()) is not None:
            self._submit(message)
            if len(self._live) >= READ_AHEAD:
                # A client that takes no replies gets no further; one that takes them is not held up.
                await self._writable.wait()
            while limit is not None and self._sink.waiting >= limit:
                self._taken.clear()
                await self._taken.wait()

    def _place(self, head: bytes, byte_size: int) -> memoryview | None:
        """Return memory of its model for a large message."""
        body = place_for(self._kernel, head, byte_size, streaming=True)
        if body is None:
            return None
        self._bodies.append(body)
        return body.view

    def _submit(self, message: Buffer) -> None:
        received_in = self._bodies[0] if self._bodies and self._bodies[0].view is message else None
        try:
            self._start(message, received_in)
        finally:
            if received_in is not None:
                self._bodies.popleft().release()

    def _start(self, message: Buffer, body: Body | None) -> None:
        """Give the request in `message` to the kernel, or say on the stream why not."""
        kernel = self._kernel
        port = self._sink.port()
        known = self._forms.find(message, kernel.catalog.generation, port)
        if known is not None:
            request, form = known
        else:
            try:
                parsed, raw_contents = parse_request(message)
            except DecodeError as error:
                raise grpc_error(error, "") from None
            request = start_request(parsed, port, streaming=True)
        port.request = request
        live = self._live[request] = _Live()
        self._answered.clear()
        try:
            if known is not None:
                model, live.wants_empty_final = form.common.model, form.wants_empty_final
                live.ordered = not model.spec.decoupled
                kernel.lease(request)
            else:
                live.ordered = not kernel.resolve(request.model_name, request.model_version).spec.decoupled
                live.wants_empty_final = decode_request(parsed, request, raw_contents)
                model = kernel.check(request)
                self._forms.remember(message, request, model, wants_empty_final=live.wants_empty_final)
            self._forward(request)
            kernel.start(request, model, body)
            # What a scheduler does not even queue is refused as well.
            live.refused = request.failed and not request.dispatched
        except ServingError as error:
            live.refused = True
            self._sink.put(request, Response(request.model_name, request.model_version, request.id, error=error))
        if live.ordered:
            self._order.begin(request)

    def _forward(self, request: Request) -> None:
        """Add what the call's metadata says to the request's parameters."""
        if self._forwarder is None:
            return
        try:
            forwarded = self._forwarder.of_stream(self._stream)
        except BaseException:
            request.release_leases()
            raise
        request.parameters = {**request.parameters, **forwarded}

    # ---- replies -----------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            request, response = await self._sink.next()
            self._taken.set()
            live = self._live[request]
            if response.error is not None and self._fails_on_error and not live.refused:
                raise response.error
            reply = _reply(request, live, response)
            due = self._order.put(request, reply, final=reply.final) if live.ordered else [reply]
            for reply in due:
                await self._send(reply)

    async def _send(self, reply: _Reply) -> None:
        if reply.parts:
            if not self._headers_sent:
                self._headers_sent = True
                await self._stream.send_initial_metadata()
            self._writable.clear()
            await self._wire.send_message(reply.parts, reply.release)
            self._writable.set()
        else:
            reply.release()
        if reply.final:
            del self._live[reply.request]
            if not self._live:
                self._answered.set()


def _reply(request: Request, live: _Live, response: Response) -> _Reply:
    """Return what is to be sent for a response, which is released with the reply."""
    try:
        if response.error is None and not response.empty:
            return _Reply(request, stream_response_parts(response), response.release, response.final)
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
        return _Reply(request, [], response.release, response.final)
    return _Reply(request, [message.SerializeToString()], response.release, response.final)
