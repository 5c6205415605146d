"""One inference request of the lane: from its body to the bytes of its answer, without a task of its own."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InternalError, ServingError, request_prefix
from kernel.serving.request import Request
from protocols.http.codec import encode_infer
from protocols.http.compression import IDENTITY, compress
from protocols.http.endpoints.infer import ENTRY_POINT, HEADER_LENGTH, THREAD_BYTE_SIZE, decode_body
from protocols.http.fast.response_bytes import ResponseBytes, error_reply, reply_head
from protocols.http.internal_errors import log_bug
from protocols.http.responses import JSON
from protocols.response_sinks import OnlyResponse
from protocols.status import HTTP_STATUS

if TYPE_CHECKING:
    from kernel.memory.receive_buffer import ReceiveBuffer
    from kernel.serving.model import Model
    from kernel.serving.response import Response
    from protocols.http.codec import OutputForm
    from protocols.http.fast.connection import FastConnection
    from protocols.http.fast.fast_path import FastPath
    from protocols.http.fast.prepared import RequestBody
    from protocols.http.fast.request_head import InferHead
    from protocols.http.fast.response_template import ResponseTemplate

#: From here on outputs are written as they are, where they are; below, one copy is cheaper than pieces.
_LARGE_BYTE_SIZE = 64 << 10

_BINARY = "application/octet-stream"
_HEADER_LENGTH = HEADER_LENGTH.encode() + b": %d\r\n"


class FastCall(msgspec.Struct, eq=False):
    """The sink of its request. Tells its `connection` when `reply` is there."""

    lane: FastPath
    head: InferHead
    #: None where nobody waits for the answer any more.
    connection: FastConnection | None
    #: The bytes of the answer, as soon as there is one.
    reply: ResponseBytes | None = None
    _request: Request | None = None
    _form: OutputForm | None = None
    #: What the answer may be like: where only its bytes differ, nothing has to be encoded.
    _like: ResponseTemplate | None = None
    #: Made where the response does not come in one with the final flag.
    _only: OnlyResponse | None = None

    def start(self, model: Model, body: RequestBody, received_in: ReceiveBuffer | None = None) -> None:
        """Submit the request in `body`, or answer why not. `received_in` is the buffer that holds `body`, if any."""
        lane = self.lane
        kernel = lane.kernel
        try:
            known = lane.forms.find(self.head, body, kernel.catalog.generation, self)
            if known is not None:
                request, form = known
                self._form = form.outputs
                if self.head.encoding == IDENTITY:
                    self._like = form.answer
                self._request = request
                kernel.submit(request, form.common, received_in)
                return
            head = self.head
            request = Request(head.model, [], self, model_version=head.version, entry_point=ENTRY_POINT)
            self._form = decode_body(body, head.header_length, request, model, lane.max_input_size)
            self._request = request
            remember = functools.partial(lane.forms.remember, head, body, self._form)
            kernel.submit(request, None, received_in, remember)
        except ServingError as error:
            self.finish(_told(error, plain=False))
        except Exception:
            self.finish(self._bug())

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self.connection = self._like = None
        if self._request is not None and self.reply is None:
            self.lane.kernel.cancel(self._request)

    def finish(self, reply: ResponseBytes) -> None:
        """Answer with `reply`, a whole HTTP response."""
        self.reply = reply
        # Forms remember requests, and these their sink: the connection is not to live as long.
        self._request, connection, self.connection = None, self.connection, None
        if connection is not None:
            connection.answered()

    def send(self, response: Response) -> None:
        like = self._like
        if like is not None and response.final and response.error is None:
            # What is done here alone nearly every response takes: as `finish`, without the calls.
            octets = like.another(response, self.lane.now)
            if octets is not None:
                if response.leased:
                    response.release()
                self.reply, self._request = ResponseBytes(octets), None
                if self.connection is not None:
                    self.connection.answered()
                return
        found = response
        if self._only is not None or response.empty or not response.final:  # unusual
            if self._only is None:
                self._only, self._like = OnlyResponse(), None
            if not self._only.add(response):
                return
            try:
                found = self._only.take()
            except InternalError as error:
                self.finish(_told(error, plain=False))
                return
        if self.connection is not None:
            reply = self._reply(found)
            if reply is not None:
                if reply.release is None:
                    found.release()
                self.finish(reply)
                return
        found.release()

    def _reply(self, response: Response) -> ResponseBytes | None:
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

    def _encode(self, response: Response) -> ResponseBytes | None:
        assert self._form is not None, "the request was never decoded"
        encoded = encode_infer(response, self._form)
        content_type, more = JSON, b""
        if encoded.has_binary:
            content_type, more = _BINARY, _HEADER_LENGTH % len(encoded.header)
        if self.head.encoding != IDENTITY:
            return self._compress(encoded.join(), content_type, more)
        byte_size = len(encoded.header) + sum(map(len, encoded.binary))
        head = reply_head(200, content_type, byte_size, more)
        if byte_size >= _LARGE_BYTE_SIZE:
            return ResponseBytes(head + encoded.header, encoded.binary, response.release)
        if self._like is not None:
            self._like.remember(response, encoded, head, self.lane.now)
        return ResponseBytes(b"".join((head, encoded.header, *encoded.binary)))

    def _compress(self, body: bytes, content_type: str, more: bytes) -> ResponseBytes | None:
        encoding = self.head.encoding
        more += b"Content-Encoding: %b\r\n" % encoding.encode()

        def reply_with(packed: bytes) -> ResponseBytes:
            return ResponseBytes(reply_head(200, content_type, len(packed), more), [packed])

        if len(body) < THREAD_BYTE_SIZE:
            return reply_with(compress(body, encoding))
        packing = asyncio.get_running_loop().run_in_executor(None, compress, body, encoding)
        packing.add_done_callback(lambda packed: self.finish(reply_with(packed.result())))
        return None

    def _bug(self) -> ResponseBytes:
        """Return the answer for the exception that is being handled."""
        version = f"/versions/{self.head.version}" if self.head.version else ""
        return error_reply(500, log_bug(f"POST /v2/models/{self.head.model}{version}/infer"), plain=False)


def _told(error: ServingError, *, plain: bool) -> ResponseBytes:
    return error_reply(HTTP_STATUS[error.code], error.message, plain=plain)
