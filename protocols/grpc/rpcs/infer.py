"""ModelInfer: one request, one response, without a task: from the message to the kernel in one call.

The response is encoded as the kernel gives it. Whatever ends the call before, its client, its deadline
or the stop of the server, cancels the request.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from grpclib.const import Status

from kernel.errors import InternalError
from protocols.grpc.calls import ServerShuttingDown
from protocols.grpc.h2.headers import status_block
from protocols.grpc.handlers import CUT_OFF
from protocols.grpc.messages.codec import decode_request, parse_request, response_parts, start_request
from protocols.grpc.messages.prepared import PreparedMessages
from protocols.grpc.messages.receive_placement import place_for
from protocols.grpc.rpc import grpc_error
from protocols.response_sinks import OnlyResponse

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from kernel.serving.response import Response
    from protocols.grpc.calls import OpenCalls
    from protocols.grpc.compression import ResponseCompression
    from protocols.grpc.h2.streams import Stream
    from protocols.grpc.h2.transport import ServerConnection
    from protocols.grpc.metadata import MetadataForwarder
    from shm.tensor import Buffer


#: What Triton calls this call in errors.
ENTRY_POINT = "ModelInfer RPC"


class Inference:
    """The unary inference RPC."""

    def __init__(
        self,
        kernel: Kernel,
        calls: OpenCalls,
        forwarder: MetadataForwarder | None = None,
        compression: ResponseCompression | None = None,
    ) -> None:
        """Without `forwarder` no metadata is forwarded, without `compression` no response is compressed."""
        self.compression = compression
        self.kernel = kernel
        self.calls = calls
        self.forwarder = forwarder
        self.forms = PreparedMessages()

    def receive(self, head: bytes, byte_size: int) -> ReceiveBuffer | None:
        """Return where to receive a message that begins with `head`, None where any memory will do."""
        known = self.forms.announced(head, byte_size, self.kernel.catalog.generation)
        if known is not None:
            model, first_tensor = known
            return self.kernel.receive_buffer(model, byte_size, first_tensor)
        return place_for(self.kernel, head, byte_size, streaming=False)


class InferCall(msgspec.Struct, eq=False):
    """One call: takes its message from the stream, and its response from the kernel as the request's sink."""

    _inference: Inference
    _connection: ServerConnection
    _stream: Stream
    _request: Request | None = None
    #: Made where the response does not come in one with the final flag.
    _only: OnlyResponse | None = None
    _deadline: asyncio.TimerHandle | None = None
    #: What the message is received in, if that is memory of a model.
    _body: ReceiveBuffer | None = None

    def prepare(self) -> None:
        """Get ready for a call that has a deadline, or whose message is still to come; others need it not."""
        timeout_s = self._stream.head.timeout_s
        if timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        if self._stream.whole is None:
            self._stream.reader.place = self._place

    # ---- protocols.grpc.h2.streams.StreamCallbacks -------------------------------------------------------

    def readable(self) -> None:
        if self._request is not None:
            return
        if self._stream.whole is not None:  # usual
            self._submit(self._stream.whole)
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
        self._release_body()
        if self._request is not None:
            self._inference.kernel.cancel(self._request)

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
            self._inference.kernel.cancel(self._request)

    # ---- the request ---------------------------------------------------------------------------

    def _place(self, head: bytes, byte_size: int) -> memoryview | None:
        """Return memory of the model for a large message; a second one is refused when it has come."""
        if self._body is None:
            self._body = self._inference.receive(head, byte_size)
            if self._body is not None:
                return self._body.view
        return None

    def _release_body(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.release()

    def _submit(self, message: Buffer) -> None:
        """Give the request in `message` to the kernel, or answer what is wrong with it."""
        inference = self._inference
        kernel = inference.kernel
        try:
            if inference.calls.stopping:
                raise ServerShuttingDown
            forwarder = inference.forwarder
            forwarded = forwarder.of_head(self._stream.head) if forwarder is not None else None
            known = inference.forms.find(message, kernel.catalog.generation, self)
            if known is not None:
                request, form = known
                if forwarded:
                    request.parameters = {**request.parameters, **forwarded}
                kernel.submit(request, form.common, self._body)
            else:
                request = self._parse(message)

                def remember(checked: Request, model: Model) -> None:
                    inference.forms.remember(message, checked, model)
                    if forwarded:  # the next message of this form may come with other metadata
                        checked.parameters = {**checked.parameters, **forwarded}

                kernel.submit(request, None, self._body, remember)
        except Exception as error:
            self._fail_with(error)
            return
        finally:
            if self._body is not None:
                self._release_body()
        if self._stream.open:  # not answered yet
            self._request = request

    def _parse(self, message: Buffer) -> Request:
        """Return the request in `message`. Raises what is wrong with it."""
        parsed, raw_contents = parse_request(message)
        # Refused before its tensors are decoded, as in Triton.
        self._inference.kernel.resolve_unary(parsed.model_name, parsed.model_version, ENTRY_POINT)
        request = start_request(parsed, self, streaming=False)
        request.entry_point = ENTRY_POINT
        decode_request(parsed, request, raw_contents)
        return request

    # ---- kernel.serving.response.Sink ------------------------------------------------------------------

    def send(self, response: Response) -> None:
        if self._only is not None or response.outputs is None or not response.final:  # unusual
            found = self._collect(response)
            if found is None:
                return
            response = found
        self._request = None  # which refers to this call as its sink
        if not self._stream.open:
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
        compression = self._inference.compression
        if compression is not None:
            compression.respond(self._connection, self._stream, parts, response.release)
            return
        release = None if response.leased is False else response.release
        self._connection.machine.respond(self._stream, parts, release)
        self._connection.wake()

    def _collect(self, response: Response) -> Response | None:
        """Take a response that is not the only one; returns the one to send when the last has come."""
        if self._only is None:
            self._only = OnlyResponse()
        if not self._only.add(response):
            return None
        self._request = None
        try:
            return self._only.take()
        except InternalError as error:
            if self._stream.open:
                self._fail_with(error)
            return None

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
