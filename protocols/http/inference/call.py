"""One inference request over HTTP, from its body to its response: the same on the fast path and in aiohttp.

All decisions are here: how the body is decoded, which errors are plain text, how the response is encoded. The fast
path and the endpoint for aiohttp only receive the body and send the response.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import InternalError, InvalidArgument, ServingError
from kernel.serving.request import Request
from kernel.serving.response import peer_of_sink
from kernel.tracing.explanation import take_explain
from kernel.tracing.front_doors import HTTP, Reception
from protocols.forwarding import last_value
from protocols.helpers.loop_budget import FREE_US, SHARED_US, LoopBudget
from protocols.helpers.request_task import RequestTask, sources_of
from protocols.http.generate.prepared import PreparedGenerateBodies
from protocols.http.inference.codec import OutputFormat, decode_infer, decode_typed
from protocols.http.inference.compression import IDENTITY, compress
from protocols.http.inference.encoding import encode_infer
from protocols.http.inference.prepared import PreparedBodies
from protocols.http.inference.raw_input import decode_raw
from protocols.http.inference.response import HttpResponse, http_error
from protocols.http.inference.response_task import BINARY, HEADER_LENGTH, ResponseTask, response_cost_us
from protocols.http.inference.tasks import DECODE_INFER, DecodeArguments, read_output_format
from protocols.http.json.cost import decode_cost_us
from protocols.http.json.tensor import NeedsCare
from protocols.http.responses import JSON, retry_headers
from protocols.internal_errors import unexpected_error
from protocols.response_sinks import OnlyResponse
from protocols.status import http_status

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from kernel.serving.response import Response
    from protocols.access.peer_identity import Peer
    from protocols.http.inference.head import InferRequestHead
    from protocols.http.inference.json_response_template import JsonResponseTemplate
    from protocols.http.inference.prepared import RequestBody
    from protocols.http.inference.response_template import ResponseTemplate
    from shm.tensor import Tensor

#: What Triton calls this call in errors.
ENTRY_POINT = "HTTP end point"

#: Values of the header that asks for an explanation.
EXPLAINS = frozenset({b"1", b"true"})

#: JSON up to this size is decoded in the event loop whatever it says, and with all checks: at most 1 ms or so.
_CAREFUL_BYTE_SIZE = 2 << 10

#: JSON of more bytes takes longer than the event loop has.
_MEDIUM_BYTE_SIZE = 1 << 20


class HttpInference:
    """What all inference requests of one HTTP server share."""

    def __init__(self, kernel: Kernel, max_input_size: int) -> None:
        """`max_input_size` is how many bytes JSON, raw input and inflated bodies may have."""
        self.kernel = kernel
        self.max_input_size = max_input_size
        self.prepared_bodies = PreparedBodies(max_input_size)
        self.prepared_generate = PreparedGenerateBodies(max_input_size)
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

    inference: HttpInference
    head: InferRequestHead
    #: None once the response is not wanted any more.
    waiter: ResponseWaiter | None
    #: The id of the request, for the access log.
    request_id: str = ""
    #: When the head of the request and all of its body came, in monotonic nanoseconds; 0 unless these are noted, for
    #: the access log or because requests are traced. The second one is also 0 if head and body came together.
    begin_ns: int = 0
    received_ns: int = 0
    #: The submitted request, until it has its response.
    _request: Request | None = None
    _outputs: OutputFormat | None = None
    #: Writes the response without encoding it, where only its bytes differ from the one before.
    _template: ResponseTemplate | JsonResponseTemplate | None = None
    #: Only where the response and the final flag come apart.
    _only: OnlyResponse | None = None
    #: Whether the request is being decoded by a helper: then it is not submitted yet.
    preparing: bool = False
    #: What a helper does for the call: decode its request, or encode its response.
    _task: RequestTask | ResponseTask | None = None

    def start(self, body: RequestBody, received_in: ReceiveBuffer | None = None) -> None:
        """Submit the request in `body`, or respond with what is wrong with it.

        `received_in` is the buffer that holds `body`, if any; it stays the caller's to release.
        """
        head, inference = self.head, self.inference
        kernel = inference.kernel
        try:
            found = inference.prepared_bodies.match(head, body, kernel.catalog.generation, self)
            if found is not None and (received_in is None or received_in.of_model):
                request, prepared = found
                self._outputs, self._template = prepared.outputs, prepared.template
                self._request, self.request_id = request, request.id
                if head.forwarded is not None:
                    request.parameters = head.forwarded.added_to(request.parameters)
                kernel.submit(request, prepared.common, received_in)
            else:
                self._submit_new(body, received_in)
        except ServingError as error:
            self.finish(_error(error, plain=False))
        except Exception as error:
            self.finish(self._internal_error(error))

    def _submit_new(self, body: RequestBody, received_in: ReceiveBuffer | None) -> None:
        """Submit the request in `body`, for which nothing is prepared. Raises `ServingError`."""
        head, inference = self.head, self.inference
        request = self._new_request()
        outputs = self._decode(body, request, received_in)
        if outputs is None:
            sources = sources_of(inference.kernel, body, received_in)
            self.decode_in_helper(self._new_request(), sources, head.header_length)
            return
        if received_in is not None and not received_in.of_model:
            received_in = None  # all tensors were in JSON
        request.explain = head.explain or take_explain(request)
        self._outputs, self._request, self.request_id = outputs, request, request.id
        keep = functools.partial(inference.prepared_bodies.add, head, body, outputs)
        if head.forwarded is None:
            inference.kernel.submit(request, None, received_in, keep)
            return
        parameters = head.forwarded.added_to(request.parameters)

        def keep_without_forwarded(checked: Request, model: Model) -> None:
            """The next request with this body may come with other headers."""
            keep(checked, model)
            checked.parameters = parameters

        inference.kernel.submit(request, None, received_in, keep_without_forwarded)

    def _new_request(self) -> Request:
        head = self.head
        return Request(head.model_name, [], self, model_version=head.model_version, entry_point=ENTRY_POINT)

    def _decode(self, body: RequestBody, request: Request, received_in: ReceiveBuffer | None) -> OutputFormat | None:
        """Fill `request` from `body`; None where a helper is to do it. Raises `ServingError`."""
        head, inference = self.head, self.inference
        length = head.header_length
        if received_in is not None and not received_in.of_model and length < len(body):
            return None  # the tensors behind the header are not where the model can read them
        if length <= _CAREFUL_BYTE_SIZE:
            return decode_body(body, length, request, head.model, inference.max_input_size)
        if length > _MEDIUM_BYTE_SIZE:
            return None
        view = memoryview(body)
        header = bytes(view[:length])
        if not inference.takes(decode_cost_us(header), others_wait=head.model.in_flight > 0):
            return None
        try:
            return decode_typed(header, view[length:], request, inference.max_input_size)
        except NeedsCare:
            return None

    def decode_in_helper(
        self, request: Request, sources: list[Tensor], announced: int | None, content_encoding: str = IDENTITY
    ) -> None:
        """Submit `request` when a helper has decoded its body, of which `sources` are the parts, as it was sent.

        The leases of `sources` are the call's from now on. Raises `ServingError`.
        """
        head, inference = self.head, self.inference
        arguments = DecodeArguments(
            head.model.spec,
            head.model_name,
            announced,
            content_encoding,
            inference.max_input_size,
            inference.kernel.settings.max_decompression_ratio,
        )
        task = RequestTask(
            inference.kernel, head.model, request, self, DECODE_INFER, msgspec.msgpack.encode(arguments), sources
        )
        self._request, self._task, self.preparing = request, task, True
        try:
            task.start()
        except ServingError:
            self._task, self.preparing = None, False
            raise

    def refuse(self, error: ServingError) -> None:
        """Respond with `error` in place of submitting a request."""
        self.finish(_error(error, plain=False))

    def cancel(self) -> None:
        """The response is not wanted any more: its client has disconnected."""
        self.waiter = self._template = None
        if self._task is not None:
            self._task.cancel()
            if self.preparing:
                return
        if self._request is not None:
            self.inference.kernel.cancel(self._request)

    def finish(self, response: HttpResponse) -> None:
        """Turn `response` into what is sent, release its source when that was copied or sent, and call `_left`."""
        raise NotImplementedError

    def _left(self) -> None:
        """The response is there: let the waiter send it, and drop references that are not needed any more."""
        # The request refers to its sink, which is this call.
        self._request, self._task, waiter, self.waiter = None, None, self.waiter, None
        if waiter is not None:
            waiter.response_ready()

    # ---- protocols.helpers.request_task.Preparing ----------------------------------------------------

    def prepared(self, response_options: bytes) -> None:
        """See `Preparing`."""
        request = self._request
        assert request is not None, "the request was cancelled"
        self._task, self.preparing = None, False
        self._outputs, self.request_id = read_output_format(response_options), request.id
        request.explain = self.head.explain or take_explain(request)
        if self.head.forwarded is not None:
            request.parameters = self.head.forwarded.added_to(request.parameters)
        try:
            self.inference.kernel.submit(request, admitted=True)
        except ServingError as error:
            self.finish(_error(error, plain=False))
        except Exception as error:
            self.finish(self._internal_error(error))
        if self.waiter is not None:
            self.waiter.request_prepared()

    def refused(self, error: ServingError) -> None:
        """See `Preparing`."""
        self._task, self.preparing = None, False
        # Triton sends what is wrong with compressed bytes as plain text, and what is wrong with a request as JSON.
        self.finish(_error(error, plain=type(error) is InvalidArgument and error.before_queueing))

    # ---- kernel.serving.response.Sink --------------------------------------------------------

    @property
    def peer(self) -> str:
        return "" if self.waiter is None else self.waiter.peer.identity

    def header(self, name: str) -> str:
        return last_value(self.head.headers, name)

    def reception(self) -> Reception:
        """See `kernel.tracing.front_doors.FrontDoorSink`."""
        return HTTP, self.begin_ns, self.received_ns, None

    def send(self, response: Response) -> None:
        if self._only is not None or response.empty or not response.final:  # unusual
            if self._only is None:
                self._only, self._template = OnlyResponse(), None
            if not self._only.add(response):
                return
            try:
                response = self._only.take()
            except InternalError as error:
                self.finish(_error(error, plain=False))
                return
        if self.waiter is None:
            self._request = None
            response.release()
            return
        http_response: HttpResponse | None
        if response.error is not None:
            # Triton sends errors of later phases as plain text; here some of its early checks come late.
            http_response = _error(response.error, plain=not response.error.before_queueing)
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
        assert self._outputs is not None, "the request was not decoded"
        encoding = self.head.encoding
        cost_us = response_cost_us(response, self._outputs, encoding)
        if not self.inference.takes(cost_us, others_wait=self.head.model.in_flight > 1):
            self._encode_in_helper(response, self._outputs)
            return None
        try:
            encoded = encode_infer(response, self._outputs, plain_only=cost_us > 0)
        except NeedsCare:
            self._encode_in_helper(response, self._outputs)
            return None
        content_type, headers = JSON, {}
        if encoded.has_binary:
            content_type, headers = BINARY, {HEADER_LENGTH: str(len(encoded.header))}
        if encoding == IDENTITY:
            return HttpResponse(200, content_type, [encoded.header, *encoded.binary], headers, response)
        headers["Content-Encoding"] = encoding
        return HttpResponse(200, content_type, [compress(encoded.join(), encoding)], headers)

    def _encode_in_helper(self, response: Response, outputs: OutputFormat) -> None:
        self._request = None  # it has its response, and is not to be cancelled
        kernel, peer = self.inference.kernel, peer_of_sink(self)
        self._task = task = ResponseTask(kernel, response, outputs, self.head.encoding, self.finish, peer)
        task.start()

    def _internal_error(self, error: Exception) -> HttpResponse:
        """Return the response for an exception that nobody expected."""
        return _error(unexpected_error(f"POST {self.head.target}", error), plain=False)


def decode_body(
    body: RequestBody, header_length: int, request: Request, model: Model, max_input_size: int
) -> OutputFormat:
    """Fill `request` from a body whose first `header_length` bytes are JSON; 0 stands for a raw request.

    Inputs keep parts of `body`. Raises `ServingError`.
    """
    if header_length:
        view = memoryview(body)
        return decode_infer(bytes(view[:header_length]), view[header_length:], request, max_input_size)
    request.inputs.append(decode_raw(body, model.spec))
    return OutputFormat(binary=True)


def _error(error: ServingError, *, plain: bool) -> HttpResponse:
    response = http_error(http_status(error), error.text, plain=plain)
    response.headers = retry_headers(error)
    return response
