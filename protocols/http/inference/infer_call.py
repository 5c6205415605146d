"""One inference request over HTTP, from its body to its response: the same on the fast path and in aiohttp.

All decisions are here: how the body is decoded, which errors are plain text, how the response is encoded, and which
response is so large that a helper encodes it (`ResponseTask`). The fast path and the endpoint for aiohttp only receive
the body and send the response.
"""

from __future__ import annotations

import asyncio
import math
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import InternalError, InvalidArgument, ServingError
from kernel.observe.internal_errors import unexpected_error
from kernel.records.front_doors import HTTP, Reception
from kernel.serving.request import Request
from kernel.serving.response import peer_of_sink
from protocols.forwarding import last_value
from protocols.http.inference.compression import IDENTITY, compress
from protocols.http.inference.decoding import OutputFormat, decode_infer, decode_raw, decode_typed
from protocols.http.inference.encoding import encode_infer
from protocols.http.inference.prepared import PreparedBodies
from protocols.http.inference.tasks import (
    DECODE_INFER,
    ENCODE_INFER,
    DecodeArguments,
    encode_arguments,
    read_lengths,
    read_output_format,
)
from protocols.http.json.cost import decode_cost_us, encode_cost_us
from protocols.http.json.tensor import NeedsCare
from protocols.http.responses import JSON, HttpResponse, http_error, retry_headers
from protocols.intake import Decoded, HelperJob, Intake, OnlyResponse, take
from protocols.large_requests import sources_of
from protocols.loop_budgets import FREE_US, SHARED_US, LoopBudget
from protocols.status import HTTP_STATUS, http_status
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.memory.input_placement import ReceiveBuffer
    from kernel.serving.interface import KernelInterface
    from kernel.serving.response import Response
    from kernel.serving.route import ModelRoute
    from protocols.access import Peer
    from protocols.http.inference.prepared import InferRequestHead, PreparedBody, PreparedJsonBody, RequestBody
    from protocols.large_requests import RequestTask
    from shm.tensor import Span, Tensor

#: What Triton calls this call in errors.
ENTRY_POINT = "HTTP end point"

#: Values of the header that asks for an explanation.
EXPLAINS = frozenset({b"1", b"true"})

#: JSON up to this size is decoded in the event loop whatever it says, and with all checks: at most 1 ms or so.
_CAREFUL_BYTE_SIZE = 2 << 10

#: JSON of more bytes takes longer than the event loop has.
_MEDIUM_BYTE_SIZE = 1 << 20


class DecodedBody(msgspec.Struct, frozen=True):
    """What the response to a body needs to know; a `PreparedBody` has it, too."""

    outputs: OutputFormat
    template: None = None


class HttpInference(Intake):
    """What all inference requests of one HTTP server share."""

    def __init__(self, kernel: KernelInterface, max_input_size: int, *, forwards: bool = True) -> None:
        """`max_input_size` is how many bytes JSON, raw input and inflated bodies may have.

        Without `forwards` no head has headers to forward.
        """
        super().__init__(kernel, attrgetter("head.forwarded") if forwards else None)
        self.max_input_size = max_input_size
        self.prepared_bodies = PreparedBodies(max_input_size)
        self.match = self.prepared_bodies.match
        self._loop_budget = LoopBudget()
        #: The clock of the fast path in seconds: while it does not change, responses may carry the same `Date`.
        self.now_s = 0.0

    def takes(self, cost_us: float, *, others_wait: bool = False) -> bool:
        """Whether the event loop may do work of `cost_us` now; if not, it is a helper's. It counts then.

        While `others_wait`, an idle helper does what takes long enough.
        """
        if cost_us <= FREE_US:
            return True
        helpers = self.kernel.helpers
        helpers.start_ahead()
        if cost_us > SHARED_US and others_wait and helpers.idle:
            return False
        budget = self._loop_budget
        was_fresh = budget.is_fresh
        taken = budget.take(cost_us, unaided=not helpers.ready)
        if was_fresh and not budget.is_fresh:
            asyncio.get_running_loop().call_soon(budget.reset)
        return taken

    # ---- protocols.intake.Intake --------------------------------------------------------------

    def decode(self, call: HttpInferCall, body: RequestBody, received_in: ReceiveBuffer | None) -> Decoded | None:
        request, head = _new_request(call), call.head
        outputs = self._decode_into(request, head, body, received_in)
        if outputs is None:
            return None
        # The models may have changed since the head was read.
        route = self.kernel.unary_route(head.model_name, head.model_version, ENTRY_POINT)
        return Decoded(request, route, DecodedBody(outputs))

    def _decode_into(
        self, request: Request, head: InferRequestHead, body: RequestBody, received_in: ReceiveBuffer | None
    ) -> OutputFormat | None:
        """Fill `request` from `body`; None where a helper is to do it. Raises `ServingError`."""
        length = head.header_length
        if received_in is not None and not received_in.of_model and length < len(body):
            return None  # the tensors behind the header are not where the model can read them
        if length <= _CAREFUL_BYTE_SIZE:
            return decode_body(body, length, request, head.route, self.max_input_size)
        if length > _MEDIUM_BYTE_SIZE:
            return None
        view = memoryview(body)
        header = bytes(view[:length])
        if not self.takes(decode_cost_us(header), others_wait=head.route.in_flight > 0):
            return None
        try:
            return decode_typed(header, view[length:], request, self.max_input_size)
        except NeedsCare:
            return None

    def keep(self, call: HttpInferCall, body: RequestBody, decoded: Decoded) -> None:
        assert decoded.route is not None, "a body is kept without its route"
        self.prepared_bodies.add(call.head, body, decoded.options.outputs, decoded.request, decoded.route)

    def helper_job(
        self, call: HttpInferCall, body: RequestBody, received_in: ReceiveBuffer | None
    ) -> tuple[Request, HelperJob]:
        sources = sources_of(self.kernel, body, received_in)
        return self.job_for_sources(call, sources, call.head.header_length)

    def job_for_sources(
        self, call: HttpInferCall, sources: list[Tensor], announced: int | None, content_encoding: str = IDENTITY
    ) -> tuple[Request, HelperJob]:
        """Return what `helper_job` does for a body of which `sources` are the parts, as it was sent."""
        head = call.head
        arguments = DecodeArguments(
            head.route.spec,
            head.model_name,
            announced,
            content_encoding,
            self.max_input_size,
            self.kernel.settings.max_decompression_ratio,
        )
        return _new_request(call), HelperJob(DECODE_INFER, msgspec.msgpack.encode(arguments), sources, head.route)

    def read_options(self, octets: bytes, route: ModelRoute) -> DecodedBody:
        return DecodedBody(read_output_format(octets))


def _new_request(call: HttpInferCall) -> Request:
    head = call.head
    return Request(head.model_name, [], call, model_version=head.model_version, entry_point=ENTRY_POINT)


class ResponseWaiter(Protocol):
    """Sends the response of a call."""

    @property
    def peer(self) -> Peer:
        """The client."""

    def response_ready(self) -> None:
        """The call has its response. Called once, possibly before `start` has returned."""

    def request_prepared(self) -> None:
        """The request of the call, which a helper has decoded, was submitted: the next one may be."""


class HttpInferCall(msgspec.Struct, eq=False):
    """Submits one request and is the sink of its response. A subclass says what a response becomes."""

    intake: HttpInference
    head: InferRequestHead
    #: None once the response is not wanted any more.
    waiter: ResponseWaiter | None
    #: The id of the request, for the access log.
    request_id: str = ""
    #: When the head of the request and all of its body came, in monotonic nanoseconds; 0 unless these are noted, for
    #: the access log or because requests are traced. The second one is also 0 if head and body came together.
    begin_ns: int = 0
    received_ns: int = 0
    #: The request, until it has its response.
    request: Request | None = None
    #: The format of the response. Its template writes the response without encoding it, where only its bytes differ
    #: from the one before.
    decoded: PreparedBody | PreparedJsonBody | DecodedBody | None = None
    #: Has a helper decode the request: then it is not submitted yet.
    decoding: RequestTask | None = None
    #: Only where the response and the final flag come apart.
    _only: OnlyResponse | None = None
    #: HTTP has no header for it.
    deadline_ns: int = 0
    #: Has a helper encode the response.
    _encoding: ResponseTask | None = None

    #: Submits the request in a body, or responds with what is wrong with it.
    start = take

    def start_in_helper(self, sources: list[Tensor], announced: int | None, content_encoding: str) -> None:
        """As `start`, for a body that a helper decodes; `sources` are its parts, as it was sent.

        The leases of `sources` are the call's from now on. Raises `ServingError`.
        """
        intake = self.intake
        request, job = intake.job_for_sources(self, sources, announced, content_encoding)
        intake.decode_in_helper(self, request, job, self.head.forwarded)

    def refuse(self, error: ServingError) -> None:
        """Respond with `error` in place of submitting a request."""
        self.finish(_error(error, plain=False))

    def cancel(self) -> None:
        """The response is not wanted any more: its client has disconnected."""
        self.waiter = None
        if self.decoding is not None:
            self.decoding.cancel()
            self.decoding = self.request = None  # they refer to this call: such a cycle waits for the garbage collector
            return
        if self._encoding is not None:
            self._encoding.cancel()
        if self.request is not None:
            self.intake.kernel.cancel(self.request)

    def finish(self, response: HttpResponse) -> None:
        """Turn `response` into what is sent, release its source when that was copied or sent, and call `_left`."""
        raise NotImplementedError

    def _left(self) -> None:
        """The response is there: let the waiter send it, and drop references that are not needed any more."""
        # The request refers to its sink, which is this call.
        self.request, self._encoding, waiter, self.waiter = None, None, self.waiter, None
        if waiter is not None:
            waiter.response_ready()

    # ---- protocols.intake.IntakeCall ----------------------------------------------------------

    @property
    def explain(self) -> bool:
        return self.head.explain

    def refused(self, error: Exception) -> None:
        if not isinstance(error, ServingError):
            self.finish(self._internal_error(error))
            return
        # Triton sends what is wrong with compressed bytes as plain text, and what is wrong with a request as JSON.
        self.finish(_error(error, plain=type(error) is InvalidArgument and error.before_queueing))

    def decoded_by_helper(self) -> None:
        if self.waiter is not None:
            self.waiter.request_prepared()

    # ---- kernel.serving.response.Sink --------------------------------------------------------

    @property
    def peer(self) -> str:
        return "" if self.waiter is None else self.waiter.peer.identity

    def header(self, name: str) -> str:
        return last_value(self.head.headers, name)

    def reception(self) -> Reception:
        """Return what traces and records say of the way in (`kernel.records.front_doors.FrontDoorSink`)."""
        return HTTP, self.begin_ns, self.received_ns, None

    def send(self, response: Response) -> None:
        if self._only is not None or response.empty or not response.final:  # unusual
            if self._only is None:
                self._only = OnlyResponse()
            if not self._only.add(response):
                return
            try:
                response = self._only.take()
            except InternalError as error:
                self.finish(_error(error, plain=False))
                return
        if self.waiter is None:
            self.request = None
            response.release()
            return
        http_response: HttpResponse | None
        if response.error is not None:
            # Triton sends errors of later phases as plain text; here some of its early checks come late.
            plain = not (response.refused or response.error.before_queueing)
            http_response = _error(response.error, plain=plain)
        else:
            try:
                http_response = self._encode(response)
            except ServingError as error:
                http_response = _error(error, plain=True)
            except Exception as error:
                http_response = self._internal_error(error)
        if http_response is None:  # it comes later, and releases the response
            return
        if http_response.source is None:
            response.release()
        self.finish(http_response)

    def _encode(self, response: Response) -> HttpResponse | None:
        """Return what is sent for a response with outputs; None where that comes later. Raises `ServingError`."""
        assert self.decoded is not None, "the request was not decoded"
        encoding, outputs = self.head.encoding, self.decoded.outputs
        cost_us = response_cost_us(response, outputs, encoding)
        if not self.intake.takes(cost_us, others_wait=self.head.route.in_flight > 1):
            self._encode_in_helper(response, outputs)
            return None
        try:
            encoded = encode_infer(response, outputs, plain_only=cost_us > 0)
        except NeedsCare:
            self._encode_in_helper(response, outputs)
            return None
        content_type, headers = JSON, {}
        if encoded.has_binary:
            content_type, headers = BINARY, {HEADER_LENGTH: str(len(encoded.header))}
        if encoding == IDENTITY:
            return HttpResponse(200, content_type, [encoded.header, *encoded.binary], headers, response)
        headers["Content-Encoding"] = encoding
        return HttpResponse(200, content_type, [compress(encoded.join(), encoding)], headers)

    def _encode_in_helper(self, response: Response, outputs: OutputFormat) -> None:
        self.request = None  # it has its response, and is not to be cancelled
        kernel, peer = self.intake.kernel, peer_of_sink(self)
        self._encoding = task = ResponseTask(kernel, response, outputs, self.head.encoding, self.finish, peer)
        task.start()

    def _internal_error(self, error: Exception) -> HttpResponse:
        """Return the response for an exception that is a bug."""
        return _error(unexpected_error(f"POST {self.head.target}", error), plain=False)


def decode_body(
    body: RequestBody, header_length: int, request: Request, route: ModelRoute, max_input_size: int
) -> OutputFormat:
    """Fill `request` from a body whose first `header_length` bytes are JSON; 0 stands for a raw request.

    Inputs keep parts of `body`. Raises `ServingError`.
    """
    if header_length:
        view = memoryview(body)
        return decode_infer(bytes(view[:header_length]), view[header_length:], request, max_input_size)
    request.inputs.append(decode_raw(body, route.spec))
    return OutputFormat(binary=True)


def _error(error: ServingError, *, plain: bool) -> HttpResponse:
    response = http_error(http_status(error), error.text, plain=plain)
    response.headers = retry_headers(error)
    return response


#: How many bytes of a response are JSON, and the type of a body that is not JSON alone.
HEADER_LENGTH = "Inference-Header-Content-Length"

BINARY = "application/octet-stream"

#: Responses with more bytes of outputs are compressed by a helper. That takes about 1 ms.
_COMPRESSED_BYTE_SIZE = 16 << 10

#: Outputs with fewer bytes take the loop less time than the way to a helper, whatever they are.
_SMALL_BYTE_SIZE = 1 << 10


def response_cost_us(response: Response, output_format: OutputFormat, encoding: str) -> float:
    """Return about how many microseconds it takes to encode `response`.

    Outputs in the client's own region cost nothing: no byte of them is encoded.
    """
    cost_us, byte_size = 0.0, 0
    for output in response.outputs or ():
        if output.region_of_client is None:
            byte_size += output.byte_size
            if output.byte_size > _SMALL_BYTE_SIZE and not output_format.is_binary(output.name):
                cost_us += encode_cost_us(output.datatype, element_count(output.shape), output.byte_size)
    return math.inf if encoding != IDENTITY and byte_size >= _COMPRESSED_BYTE_SIZE else cost_us


class ResponseTask:
    """The task for one response. A `kernel.serving.helper_tasks.HelperTask`."""

    def __init__(
        self,
        kernel: KernelInterface,
        response: Response,
        output_format: OutputFormat,
        encoding: str,
        finish: Callable[[HttpResponse], None],
        peer: str = "",
    ) -> None:
        """The task owns `response`, and releases it. `finish` gets what is sent, once, and never raises."""
        self.name = ENCODE_INFER
        self.peer = peer
        self.arguments, self.sources = encode_arguments(response, output_format, encoding)
        self._kernel = kernel
        self._response = response
        self._encoding = encoding
        #: None once the response is not wanted any more.
        self._finish: Callable[[HttpResponse], None] | None = finish

    def start(self) -> None:
        """Start to encode."""
        self._kernel.helpers.add(self)

    def cancel(self) -> None:
        """The response is not wanted any more."""
        self._finish = None
        self._kernel.helpers.cancel(self)

    # ---- kernel.serving.helper_tasks.HelperTask --------------------------------------------------

    def needs_memory(self, message: bytes) -> Span:
        """Refuse: a response is written into memory of the helper."""
        raise InternalError("a response needs no memory of the server")

    def done(self, result: bytes, output: Tensor | None) -> None:
        """Send the encoded response."""
        self._response.release()
        assert output is not None, "an encoded response has bytes"
        if self._finish is None:
            output.release()
            return
        header_byte_size, has_binary = read_lengths(result)
        headers = {HEADER_LENGTH: str(header_byte_size)} if has_binary else {}
        if self._encoding != IDENTITY:
            headers["Content-Encoding"] = self._encoding
        self._finish(HttpResponse(200, BINARY if has_binary else JSON, [output.raw()], headers, output))

    def failed(self, error: ServingError) -> None:
        """Send the error. Triton sends errors of this phase as plain text."""
        self._response.release()
        if self._finish is not None:
            self._finish(http_error(HTTP_STATUS[error.code], error.text, plain=True))
