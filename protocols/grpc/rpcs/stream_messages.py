"""What a stream knows of its requests and responses, and responses as messages of the stream. Pure.

`RequestOrder` keeps responses to a request that is not the oldest until the older requests have got their final
responses. Responses of decoupled models do not wait.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from kernel.errors import ServingError
from kernel.records.front_doors import GRPC, Reception, at_iteration_end
from kernel.serving.request import NO_SINK, Request
from protocols.forwarding import last_value
from protocols.grpc.codec import encode_stream_end, encode_stream_error, stream_response_parts
from protocols.grpc.generated.grpc_service_pb2 import ModelStreamInferResponse
from protocols.intake import take

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.response import Response
    from protocols.grpc.h2.headers import RequestHead
    from protocols.grpc.intake import MessageIntake, MessageOptions
    from protocols.grpc.prepared import PreparedMessage
    from protocols.grpc.rpcs.stream import StreamCall
    from protocols.large_requests import RequestTask
    from shm.tensor import Buffer

Key = TypeVar("Key")

Sent = TypeVar("Sent")


class RequestOrder(Generic[Key, Sent]):
    """Puts responses into the order in which their requests began.

    Every request that begins gets any number of responses, of which the last one is final. What `put` returns is to
    be sent at once, in that order.
    """

    def __init__(self) -> None:
        #: The requests whose final response was not sent, oldest first, and the responses kept for each.
        self._waiting: deque[Key] = deque()
        self._kept: dict[Key, list[tuple[Sent, bool]]] = {}

    def begin(self, request: Key) -> None:
        """Put `request` behind all requests that have begun."""
        assert request not in self._kept, "a request begins once"
        self._waiting.append(request)
        self._kept[request] = []

    def put(self, request: Key, response: Sent, *, final: bool) -> list[Sent]:
        """Add a response and return all that are to be sent now."""
        if self._waiting[0] != request:
            self._kept[request].append((response, final))
            return []
        due = [response]
        if final:
            self._waiting.popleft()
            del self._kept[request]
            if self._waiting:
                due += self._now_due()
        return due

    def _now_due(self) -> list[Sent]:
        """Take what was kept for the requests that are now the oldest."""
        due: list[Sent] = []
        while self._waiting:
            oldest = self._waiting[0]
            kept, self._kept[oldest] = self._kept[oldest], []
            due += [found for found, _ in kept]
            if not (kept and kept[-1][1]):
                break
            self._waiting.popleft()
            del self._kept[oldest]
        return due

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self._waiting) == len(self._kept), "a request waits twice"
        assert set(self._waiting) == set(self._kept), "responses are kept for a request that does not wait"
        if self._waiting:
            assert not self._kept[self._waiting[0]], "the oldest request's responses were not sent"
        for kept in self._kept.values():
            assert not any(final for _, final in kept[:-1]), "a response was put after the final one"


#: How many requests without a final response a stream may have at all: requests of other clients queue behind them.
MAX_UNANSWERED_REQUESTS = 4096

#: Messages that a stream takes in one event-loop iteration, so that other clients are served, too.
MESSAGES_PER_ITERATION = 32

#: As many responses are encoded and sent in one piece, each in two steps: thousands can wait for an older one.
STEPS_PER_ITERATION = 128

#: How many requests without a final response a stream may have while its client does not read its responses.
MAX_OPEN_REQUESTS = 256


class StreamRequest(msgspec.Struct, eq=False):
    """A request whose final response was not sent yet, for the intake, and as the sink of the request."""

    intake: MessageIntake
    call: StreamCall
    #: The head says nothing about the message.
    head: None = None
    #: None where nothing of its message could be read.
    request: Request | None = None
    #: What the message says; None where it could not be read.
    decoded: PreparedMessage | MessageOptions | None = None
    decoding: RequestTask | None = None
    request_id: str = ""
    #: The deadline of a stream is not its requests' deadline.
    deadline_ns: int = 0
    #: When the message came, in monotonic nanoseconds; 0 unless requests are traced.
    begin_ns: int = 0
    #: Whether it is being given to the kernel: until then no response is written.
    submitting: bool = True
    #: Whether it was refused at once, so that its error is not a model's response.
    was_refused: bool = False

    @property
    def ordered(self) -> bool:
        """Whether its responses wait for responses to older requests; responses of decoupled models do not."""
        return self.decoded is None or not self.decoded.decoupled

    @property
    def wants_empty_final(self) -> bool:
        return self.decoded is not None and self.decoded.wants_empty_final

    @property
    def names(self) -> Request:
        """The request, for its names."""
        return self.request or _UNREADABLE

    take = take

    def forget_ended(self) -> None:
        """Drop the request once it has its final response: it refers to this sink."""
        if self.request is not None and self.request.finished:
            self.request = None

    # ---- protocols.intake.IntakeCall ----------------------------------------------------------

    @property
    def explain(self) -> bool:
        return False  # it is a parameter

    @property
    def request_head(self) -> RequestHead:
        return self.call.call.request_head

    def refused(self, error: Exception) -> None:
        self.call.refused(self, error)

    def decoded_by_helper(self) -> None:
        self.call.decoded_by_helper(self)

    def refused_at_once(self) -> None:
        """The kernel, in another process, has refused the request while it was submitted."""
        self.was_refused = True

    # ---- kernel.serving.response.Sink ------------------------------------------------------------------

    def reception(self) -> Reception:
        """Return when the request came, for traces and records: as `kernel.records.front_doors.FrontDoorSink` says."""
        return GRPC, self.begin_ns, self.begin_ns, at_iteration_end

    @property
    def peer(self) -> str:
        return self.call.call.peer.identity

    def header(self, name: str) -> str:
        return last_value(self.call.call.request_head.fields, name)

    def send(self, response: Response) -> None:
        request = self.request
        assert request is not None, "the request was forgotten before its final response"
        if self.submitting and response.error is not None and not request.dispatched:
            self.was_refused = True  # by the kernel or by a scheduler
        self.call.put(self, response)


#: Stands for the request of a message that could not be read.
_UNREADABLE = Request("", [], NO_SINK)


class EncodedStreamResponse(msgspec.Struct):
    """What is sent for a response; without parts it only ends its request."""

    opened: StreamRequest
    #: The bytes of a message, which may be memory of the response's worker until `release` is called.
    parts: list[Buffer]
    release: Callable[[], None] | None
    final: bool


def encode_for_stream(opened: StreamRequest, response: Response) -> EncodedStreamResponse:
    """Return what is sent for a response, which is released with it."""
    release = None if response.leased is False else response.release
    try:
        if response.outputs is not None and response.error is None:
            return EncodedStreamResponse(opened, stream_response_parts(response), release, response.final)
        error = response.error
    except ServingError as not_encodable:  # by gRPC
        error = not_encodable
    message = ModelStreamInferResponse()
    if error is not None:
        # The error of a request that was refused names only its id.
        encode_stream_error(opened.names, error.text, message, final=None if opened.was_refused else response.final)
    elif response.final and opened.wants_empty_final and not opened.ordered:
        encode_stream_end(opened.names, message)
    else:
        return EncodedStreamResponse(opened, [], release, response.final)
    return EncodedStreamResponse(opened, [message.SerializeToString()], release, response.final)
