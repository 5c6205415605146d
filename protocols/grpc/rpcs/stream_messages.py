"""What a stream knows of its requests and responses, and responses as messages of the stream. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.tracing.front_doors import GRPC, Reception, at_iteration_end
from protocols.forwarding import last_value
from protocols.grpc.generated.grpc_service_pb2 import ModelStreamInferResponse
from protocols.grpc.messages.codec import encode_stream_end, encode_stream_error, stream_response_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.request import Request
    from kernel.serving.response import Response
    from protocols.grpc.rpcs.stream import StreamCall
    from shm.tensor import Buffer

#: How many requests without a final response a stream may have at all: those of other clients queue behind them.
MAX_UNANSWERED_REQUESTS = 4096

#: Messages that a stream takes in one event-loop iteration, so that other clients are served, too.
MESSAGES_PER_ITERATION = 32

#: How many requests without a final response a stream may have while its client does not read its responses.
MAX_OPEN_REQUESTS = 256


class OpenRequest(msgspec.Struct):
    """What the stream knows of a request whose final response was not sent yet."""

    #: Whether its responses wait for those of older requests; those of decoupled models do not.
    ordered: bool = True
    wants_empty_final: bool = False
    #: Whether it was refused at once, so that its error is not a model's response.
    refused: bool = False


class EncodedStreamResponse(msgspec.Struct):
    """What is sent for a response; without parts it only ends its request."""

    request: Request
    #: The bytes of a message, which may be memory of the response's worker until `release` is called.
    parts: list[Buffer]
    release: Callable[[], None] | None
    final: bool


def encode_for_stream(request: Request, opened: OpenRequest, response: Response) -> EncodedStreamResponse:
    """Return what is sent for a response, which is released with it."""
    release = None if response.leased is False else response.release
    try:
        if response.outputs is not None and response.error is None:
            return EncodedStreamResponse(request, stream_response_parts(response), release, response.final)
        error = response.error
    except ServingError as not_encodable:  # by gRPC
        error = not_encodable
    message = ModelStreamInferResponse()
    if error is not None:
        # The error of a request that was refused names only its id.
        encode_stream_error(request, error.text, message, final=None if opened.refused else response.final)
    elif response.final and opened.wants_empty_final and not opened.ordered:
        encode_stream_end(request, message)
    else:
        return EncodedStreamResponse(request, [], release, response.final)
    return EncodedStreamResponse(request, [message.SerializeToString()], release, response.final)


class PreparingOnStream(msgspec.Struct, eq=False):
    """Waits for a request that a helper decodes. A `protocols.helpers.request_task.Preparing`."""

    call: StreamCall
    request: Request
    opened: OpenRequest

    def prepared(self, response_options: bytes) -> None:
        self.call.request_prepared(self.request, self.opened, response_options)

    def refused(self, error: ServingError) -> None:
        self.call.request_refused(self.request, self.opened, error)


class StreamRequestSink(msgspec.Struct, eq=False):
    """The sink of one request; `request` is set before it is submitted."""

    call: StreamCall
    request: Request | None = None
    #: When the message came, in monotonic nanoseconds; 0 unless requests are traced.
    begin_ns: int = 0

    def reception(self) -> Reception:
        """See `kernel.tracing.front_doors.FrontDoorSink`."""
        return GRPC, self.begin_ns, self.begin_ns, at_iteration_end

    @property
    def peer(self) -> str:
        return self.call.call.peer.identity

    def header(self, name: str) -> str:
        return last_value(self.call.call.request_head.fields, name)

    def send(self, response: Response) -> None:
        request = self.request
        assert request is not None
        if response.final:
            self.request = None  # the request refers to its sink: such a cycle waits for the garbage collector
        self.call.put(request, response)
