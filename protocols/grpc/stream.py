"""ModelStreamInfer: any number of requests, which overlap, and their responses on one stream.

Semantics are Triton's (stream_infer_handler.cc). One task reads and submits, one writes; a request
that fails is answered by an `error_message`, and the stream goes on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.response import Response
from protocols.grpc.calls import ServerShuttingDown
from protocols.grpc.codec import (
    decode_request,
    encode_stream_end,
    encode_stream_error,
    encode_stream_response,
    start_request,
)
from protocols.grpc.generated.grpc_service_pb2 import ModelInferRequest, ModelStreamInferResponse
from protocols.grpc.order import RequestOrder
from protocols.grpc.rpc import receive
from protocols.sinks import StreamSink

if TYPE_CHECKING:
    from grpclib.server import Stream

    from kernel.request import Request
    from kernel.router import Kernel

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
    """What is to be sent for a response; without a message it only ends its request."""

    request: Request
    message: ModelStreamInferResponse | None
    final: bool


class StreamCall:
    """One ModelStreamInfer call."""

    def __init__(self, kernel: Kernel, stream: Stream[ModelInferRequest, ModelStreamInferResponse]) -> None:
        self._kernel = kernel
        self._stream = stream
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
        while (message := await receive(self._stream)) is not None:
            self._submit(message)
            if len(self._live) >= READ_AHEAD:
                # A client that takes no replies gets no further; one that takes them is not held up.
                await self._writable.wait()

    def _submit(self, message: ModelInferRequest) -> None:
        port = self._sink.port()
        request = port.request = start_request(message, port, streaming=True)
        live = self._live[request] = _Live()
        self._answered.clear()
        try:
            model = self._kernel.resolve(request.model_name, request.model_version)
            live.ordered = not model.spec.decoupled
            live.wants_empty_final = decode_request(message, request)
            self._kernel.submit(request)
            # What a scheduler does not even queue is refused as well.
            live.refused = request.failed and not request.dispatched
        except ServingError as error:
            live.refused = True
            self._sink.put(request, Response(request.model_name, request.model_version, request.id, error=error))
        if live.ordered:
            self._order.begin(request)

    # ---- replies -----------------------------------------------------------------------------

    async def _write(self) -> None:
        while True:
            request, response = await self._sink.next()
            live = self._live[request]
            if response.error is not None and self._fails_on_error and not live.refused:
                raise response.error
            reply = _Reply(request, _encode(request, live, response), response.final)
            due = self._order.put(request, reply, final=reply.final) if live.ordered else [reply]
            for reply in due:
                await self._send(reply)

    async def _send(self, reply: _Reply) -> None:
        if reply.message is not None:
            self._writable.clear()
            await self._stream.send_message(reply.message)
            self._writable.set()
        if reply.final:
            del self._live[reply.request]
            if not self._live:
                self._answered.set()


def _encode(request: Request, live: _Live, response: Response) -> ModelStreamInferResponse | None:
    """Return the message for a response, None where there is none to send; releases the response."""
    message = ModelStreamInferResponse()
    # Of a request that was refused the client is told the id only.
    final = None if live.refused else response.final
    try:
        if response.error is not None:
            encode_stream_error(request, response.error.message, message, final=final)
        elif not response.empty:
            encode_stream_response(response, message)
        elif response.final and live.wants_empty_final and not live.ordered:
            encode_stream_end(request, message)
        else:
            return None
    except ServingError as error:  # a response that gRPC cannot carry
        message = ModelStreamInferResponse()
        encode_stream_error(request, error.message, message, final=final)
    finally:
        response.release()
    return message
