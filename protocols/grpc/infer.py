"""ModelInfer: one request, one response, without a task: from the message to the kernel in one call.

The response is encoded as the kernel gives it. Whatever ends the call before, its client, its deadline
or the stop of the server, cancels the request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpclib.const import Status

from kernel.errors import DecoupledOverUnary, InternalError
from protocols.grpc.codec import decode_request, parse_request, response_parts, start_request
from protocols.grpc.h2.headers import status_block
from protocols.grpc.handlers import CUT_OFF
from protocols.grpc.rpc import grpc_error
from protocols.sinks import OnlyResponse

if TYPE_CHECKING:
    from kernel.request import Buffer, Request
    from kernel.response import Response
    from kernel.router import Kernel
    from protocols.grpc.calls import OpenCalls
    from protocols.grpc.h2.streams import Stream
    from protocols.grpc.h2.transport import ServerConnection


class Inference:
    """The unary inference RPC."""

    def __init__(self, kernel: Kernel, calls: OpenCalls) -> None:
        self._kernel = kernel
        self._calls = calls

    def begin(self, connection: ServerConnection, stream: Stream) -> InferCall:
        """Take a call that has just come."""
        return InferCall(self, connection, stream)

    def submit(self, message: Buffer, call: InferCall) -> Request:
        """Give the request in `message` to the kernel, which answers `call`. Raises what is wrong with it."""
        parsed, raw_contents = parse_request(message)
        self._calls.check_accepting()
        model = self._kernel.resolve(parsed.model_name, parsed.model_version)
        if model.spec.decoupled:
            raise DecoupledOverUnary("ModelInfer RPC doesn't support models with decoupled transaction policy")
        request = start_request(parsed, call, streaming=False)
        decode_request(parsed, request, raw_contents)
        self._kernel.submit(request)
        return request

    def cancel(self, request: Request) -> None:
        self._kernel.cancel(request)


class InferCall:
    """One call: takes its message from the stream, and its response from the kernel as the request's sink."""

    __slots__ = ("_connection", "_deadline", "_inference", "_only", "_request", "_stream")

    def __init__(self, inference: Inference, connection: ServerConnection, stream: Stream) -> None:
        self._inference = inference
        self._connection = connection
        self._stream = stream
        self._request: Request | None = None
        self._only = OnlyResponse()
        self._deadline: asyncio.TimerHandle | None = None
        if stream.head.timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(stream.head.timeout_s, self._expire)

    # ---- protocols.grpc.h2.streams.Call -------------------------------------------------------

    def readable(self) -> None:
        if self._request is not None:
            return
        reader = self._stream.reader
        if reader.fault is not None:
            self._fail(reader.fault.status, reader.fault.text)
        elif len(reader.messages) > 1:
            self._fail(Status.INTERNAL, "more than one request message")
        elif self._stream.remote_closed:
            if reader.messages:
                self._submit(reader.messages.popleft())
            else:
                self._fail(Status.UNIMPLEMENTED, "the call ended without a request message")

    def sent(self) -> None:
        """The answer ends the call by itself."""

    def closed(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._request is not None:
            self._inference.cancel(self._request)

    def cut_off(self) -> None:
        if not self._stream.headers_sent:  # an answer that is on its way gets no second status
            self._give_up(Status.UNAVAILABLE, CUT_OFF)

    def _expire(self) -> None:
        if self._stream.open:
            self._give_up(Status.DEADLINE_EXCEEDED, None)

    def _give_up(self, status: Status, text: str | None) -> None:
        """Answer instead of the model."""
        self._fail(status, text)
        if self._request is not None:
            self._inference.cancel(self._request)

    # ---- the request ---------------------------------------------------------------------------

    def _submit(self, message: Buffer) -> None:
        try:
            request = self._inference.submit(message, self)
        except Exception as error:
            self._fail_with(error)
            return
        if self._stream.open:  # not answered yet
            self._request = request

    # ---- kernel.response.Sink ------------------------------------------------------------------

    def send(self, response: Response) -> None:
        if not self._only.add(response):
            return
        self._request = None  # which refers to this call as its sink
        try:
            found = self._only.take()
        except InternalError as error:
            if self._stream.open:
                self._fail_with(error)
            return
        if self._stream.open:
            self._respond(found)
        else:
            found.release()

    def _respond(self, response: Response) -> None:
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
        self._connection.machine.respond(self._stream, parts, response.release)
        self._connection.wake()

    # ---- failures ------------------------------------------------------------------------------

    def _fail_with(self, error: Exception) -> None:
        told = grpc_error(error, "ModelInfer")
        self._fail(told.status, told.message)

    def _fail(self, status: Status, text: str | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._stream.open:
            self._connection.machine.send_trailers(self._stream, status_block(status.value, text))
            self._connection.wake()
