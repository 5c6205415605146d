"""One inference request of the lane: from its body to the bytes of its answer, without a task of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.errors import InternalError, ServingError, request_prefix
from kernel.request import Request
from protocols.http.bugs import log_bug
from protocols.http.codec import encode_infer
from protocols.http.compression import IDENTITY, compress
from protocols.http.infer import HEADER_LENGTH, THREAD_BYTE_SIZE, decode_body
from protocols.http.lane.reply import Reply, error_reply, reply_head
from protocols.http.replies import JSON
from protocols.sinks import OnlyResponse
from protocols.status import HTTP_STATUS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.bodies import Body
    from kernel.model import Model
    from kernel.response import Response
    from kernel.router import Kernel
    from protocols.http.codec import OutputForm
    from protocols.http.lane.forms import RequestBody
    from protocols.http.lane.head import InferHead
    from protocols.http.lane.lane import Lane

#: From here on outputs are written as they are, where they are; below, one copy is cheaper than pieces.
_LARGE_BYTE_SIZE = 64 << 10

_BINARY = "application/octet-stream"
_HEADER_LENGTH = HEADER_LENGTH.encode() + b": %d\r\n"


class LaneCall:
    """The sink of its request. Tells its connection by `answered` when `reply` is there."""

    __slots__ = ("_answered", "_form", "_head", "_only", "_request", "reply")

    def __init__(self, head: InferHead, answered: Callable[[], None]) -> None:
        #: The bytes of the answer, as soon as there is one.
        self.reply: Reply | None = None
        self._head = head
        self._answered = answered
        self._request: Request | None = None
        self._form: OutputForm | None = None
        #: Made where the response does not come in one with the final flag.
        self._only: OnlyResponse | None = None

    def start(self, lane: Lane, model: Model, body: RequestBody, place: Body | None = None) -> None:
        """Submit the request in `body`, or answer why not. `place` is memory of its model that has the body."""
        kernel = lane.kernel
        try:
            known = lane.forms.find(self._head, body, kernel.catalog.generation, self)
            if known is not None:
                request, form = known
                self._form = form.outputs
                if form.common.small:
                    self._request = request
                    kernel.start_small(request, form.common.model)
                    return
                kernel.lease(request)
            else:
                request, model = self._parse(lane, model, body)
            self._request = request
            kernel.start(request, model, place)
        except ServingError as error:
            self.finish(_told(error, plain=False))
        except Exception:
            self.finish(self._bug())

    def _parse(self, lane: Lane, model: Model, body: RequestBody) -> tuple[Request, Model]:
        """Return the request in `body`, checked, and the model that is to execute it. Raises `ServingError`."""
        head = self._head
        request = Request(head.model, [], self, model_version=head.version)
        self._form = decode_body(body, head.header_length, request, model, lane.max_input_size)
        model = lane.kernel.check(request)
        lane.forms.remember(head, body, request, model, self._form)
        return request, model

    def cancel(self, kernel: Kernel) -> None:
        """Nobody waits for the answer any more."""
        self._answered = _nobody
        if self._request is not None and self.reply is None:
            kernel.cancel(self._request)

    def finish(self, reply: Reply) -> None:
        """Answer with `reply`, a whole HTTP response."""
        self.reply = reply
        self._answered()

    def send(self, response: Response) -> None:
        found = response
        if self._only is not None or response.empty or not response.final:  # unusual
            if self._only is None:
                self._only = OnlyResponse()
            if not self._only.add(response):
                return
            try:
                found = self._only.take()
            except InternalError as error:
                if self._answered is not _nobody:
                    self.finish(_told(error, plain=False))
                return
        if self._answered is not _nobody:
            reply = self._reply(found)
            if reply is not None:
                if reply.release is None:
                    found.release()
                self.finish(reply)
                return
        found.release()

    def _reply(self, response: Response) -> Reply | None:
        """Return the answer, None where it comes later. With `release` it refers to the outputs of `response`."""
        if response.error is not None:
            # Triton makes all checks that name the request before it queues it; here some come late.
            late = response.error.message.startswith(request_prefix(response.id))
            return _told(response.error, plain=not late)
        try:
            return self._encode(response)
        except ServingError as error:
            return _told(error, plain=True)
        except Exception:
            return self._bug()

    def _encode(self, response: Response) -> Reply | None:
        assert self._form is not None, "the request was never decoded"
        encoded = encode_infer(response, self._form)
        content_type, more = JSON, b""
        if encoded.has_binary:
            content_type, more = _BINARY, _HEADER_LENGTH % len(encoded.header)
        if self._head.encoding != IDENTITY:
            return self._compress(encoded.join(), content_type, more)
        byte_size = len(encoded.header) + sum(map(len, encoded.binary))
        head = reply_head(200, content_type, byte_size, more) + encoded.header
        if byte_size < _LARGE_BYTE_SIZE:
            return Reply(b"".join((head, *encoded.binary)))
        return Reply(head, encoded.binary, response.release)

    def _compress(self, body: bytes, content_type: str, more: bytes) -> Reply | None:
        encoding = self._head.encoding
        more += b"Content-Encoding: %b\r\n" % encoding.encode()

        def reply_with(packed: bytes) -> Reply:
            return Reply(reply_head(200, content_type, len(packed), more), [packed])

        if len(body) < THREAD_BYTE_SIZE:
            return reply_with(compress(body, encoding))
        packing = asyncio.get_running_loop().run_in_executor(None, compress, body, encoding)
        packing.add_done_callback(lambda packed: self.finish(reply_with(packed.result())))
        return None

    def _bug(self) -> Reply:
        """Return the answer for the exception that is being handled."""
        version = f"/versions/{self._head.version}" if self._head.version else ""
        return error_reply(500, log_bug(f"POST /v2/models/{self._head.model}{version}/infer"), plain=False)


def _told(error: ServingError, *, plain: bool) -> Reply:
    return error_reply(HTTP_STATUS[error.code], error.message, plain=plain)


def _nobody() -> None:
    """Stands where the connection was."""
