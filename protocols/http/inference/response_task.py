"""Has a helper encode a response that is too large for the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InternalError, ServingError
from protocols.http.inference.compression import IDENTITY
from protocols.http.inference.response import HttpResponse, http_error
from protocols.http.inference.tasks import ENCODE_INFER, encode_arguments, read_lengths
from protocols.http.responses import JSON
from protocols.status import HTTP_STATUS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.kernel import Kernel
    from kernel.serving.response import Response
    from protocols.http.inference.codec import OutputFormat
    from shm.tensor import Span, Tensor

#: How many bytes of a response are JSON, and the type of a body that is not JSON alone.
HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY = "application/octet-stream"

#: From this many bytes of outputs on that become JSON, or are compressed, a helper does it. 16 KiB of FP32 become JSON
#: in about 1 ms.
LOOP_BYTE_SIZE = 16 << 10


def takes_long(response: Response, output_format: OutputFormat, encoding: str) -> bool:
    """Whether `response` is to be encoded by a helper. Outputs in the client's own region are not: no byte of them."""
    byte_size = 0
    for output in response.outputs or ():
        if (encoding != IDENTITY or not output_format.is_binary(output.name)) and output.region_of_client is None:
            byte_size += output.byte_size
    return byte_size >= LOOP_BYTE_SIZE


class ResponseTask:
    """The task for one response. A `kernel.serving.helper_tasks.HelperTask`."""

    def __init__(
        self,
        kernel: Kernel,
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
        self._kernel.helpers.start(self)

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
