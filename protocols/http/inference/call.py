"""One inference request over HTTP, from its body to its response: the same on the fast path and in aiohttp.

All decisions are here: how the body is decoded, which errors are plain text, how the response is encoded. The fast
path and the endpoint for aiohttp only receive the body and send the response.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import InternalError, ServingError
from kernel.serving.request import Request
from protocols.http.inference.codec import OutputFormat, decode_infer, encode_infer
from protocols.http.inference.compression import IDENTITY, compress
from protocols.http.inference.prepared import PreparedBodies
from protocols.http.inference.raw_input import decode_raw
from protocols.http.inference.response import HttpResponse, http_error
from protocols.http.responses import JSON
from protocols.internal_errors import report_internal_error
from protocols.response_sinks import OnlyResponse
from protocols.status import HTTP_STATUS

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.kernel import Kernel
    from kernel.serving.model import Model
    from kernel.serving.response import Response
    from protocols.http.inference.head import InferRequestHead
    from protocols.http.inference.prepared import RequestBody
    from protocols.http.inference.response_template import ResponseTemplate
    from protocols.peer_identity import Peer

#: What Triton calls this call in errors.
ENTRY_POINT = "HTTP end point"

#: How many bytes of a body are JSON, of requests and of responses; behind them lie tensors.
HEADER_LENGTH = "Inference-Header-Content-Length"

#: Bodies from this size on are inflated and deflated in a thread, so that other requests do not wait.
THREAD_BYTE_SIZE = 64 << 10

_BINARY = "application/octet-stream"


class HttpInference:
    """What all inference requests of one HTTP server share."""

    def __init__(self, kernel: Kernel, max_input_size: int) -> None:
        """`max_input_size` is how many bytes JSON, raw input and inflated bodies may have."""
        self.kernel = kernel
        self.max_input_size = max_input_size
        self.prepared_bodies = PreparedBodies()
        #: The clock of the fast path in seconds: while it stands still, responses may carry the same `Date`.
        self.now_s = 0.0


class ResponseWaiter(Protocol):
    """Sends the response of a call."""

    @property
    def peer(self) -> Peer:
        """The client."""

    def response_ready(self) -> None:
        """The call has its response. Called once, possibly before `start` has returned."""


class HttpInferCall(msgspec.Struct, eq=False):
    """Submits one request and is the sink of its response. A subclass says what a response becomes."""

    inference: HttpInference
    head: InferRequestHead
    #: None once the response is not wanted any more.
    waiter: ResponseWaiter | None
    #: The id of the request, for the access log.
    request_id: str = ""
    #: The submitted request, until it has its response.
    _request: Request | None = None
    _outputs: OutputFormat | None = None
    #: Writes the response without encoding it, where only its bytes differ from the one before.
    _template: ResponseTemplate | None = None
    #: Only where the response and the final flag come apart.
    _only: OnlyResponse | None = None

    def start(self, body: RequestBody, received_in: ReceiveBuffer | None = None) -> None:
        """Submit the request in `body`, or respond with what is wrong with it.

        `received_in` is the buffer that holds `body`, if any; it stays the caller's to release.
        """
        head, inference = self.head, self.inference
        kernel = inference.kernel
        try:
            found = inference.prepared_bodies.match(head, body, kernel.catalog.generation, self)
            if found is not None:
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
        request = Request(head.model_name, [], self, model_version=head.model_version, entry_point=ENTRY_POINT)
        outputs = decode_body(body, head.header_length, request, head.model, inference.max_input_size)
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

    def cancel(self) -> None:
        """The response is not wanted any more: its client has gone."""
        self.waiter = self._template = None
        if self._request is not None:
            self.inference.kernel.cancel(self._request)

    def finish(self, response: HttpResponse) -> None:
        """Turn `response` into what is sent, release its source when that was copied or sent, and call `_left`."""
        raise NotImplementedError

    def _left(self) -> None:
        """The response is there: let the waiter send it, and drop references that are not needed any more."""
        # The request refers to its sink, which is this call.
        self._request, waiter, self.waiter = None, self.waiter, None
        if waiter is not None:
            waiter.response_ready()

    # ---- kernel.serving.response.Sink --------------------------------------------------------

    @property
    def peer(self) -> str:
        return "" if self.waiter is None else self.waiter.peer.identity

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
        if http_response is None:  # it comes later
            response.release()
            return
        if http_response.source is None:
            response.release()
        self.finish(http_response)

    def _encode(self, response: Response) -> HttpResponse | None:
        """Return what is sent for a response with outputs; None where that comes later. Raises `ServingError`."""
        assert self._outputs is not None, "the request was not decoded"
        encoded = encode_infer(response, self._outputs)
        content_type, headers = JSON, {}
        if encoded.has_binary:
            content_type, headers = _BINARY, {HEADER_LENGTH: str(len(encoded.header))}
        encoding = self.head.encoding
        if encoding == IDENTITY:
            return HttpResponse(200, content_type, [encoded.header, *encoded.binary], headers, response)
        headers["Content-Encoding"] = encoding
        body = encoded.join()
        if len(body) < THREAD_BYTE_SIZE:
            return HttpResponse(200, content_type, [compress(body, encoding)], headers)
        self._request = None  # it has its response, and is not to be cancelled
        packing = asyncio.get_running_loop().run_in_executor(None, compress, body, encoding)
        packing.add_done_callback(lambda done: self.finish(HttpResponse(200, content_type, [done.result()], headers)))
        return None

    def _internal_error(self, error: Exception) -> HttpResponse:
        """Return the response for an exception that nobody expected."""
        return http_error(500, report_internal_error(f"POST {self.head.target}", error), plain=False)


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
    return http_error(HTTP_STATUS[error.code], error.message, plain=plain)
