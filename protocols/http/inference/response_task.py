"""Has a helper encode a response that is too large for the event loop."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kernel.errors import InternalError, ServingError
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.response import HttpResponse, http_error
from protocols.http.inference.tasks import ENCODE_INFER, encode_arguments, read_lengths
from protocols.http.json.cost import encode_cost_us
from protocols.http.responses import JSON
from protocols.status import HTTP_STATUS
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.front_doors.interface import KernelInterface
    from kernel.serving.response import Response
    from protocols.http.inference.codec import OutputFormat
    from shm.tensor import Span, Tensor

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
        """Send the error. Triton sends those of this phase as plain text."""
        self._response.release()
        if self._finish is not None:
            self._finish(http_error(HTTP_STATUS[error.code], error.text, plain=True))
