"""The square backend of Triton's examples: it sends n responses with the value n, so the sum is the square of n.

Input IN and output OUT are one INT32. For tests, a model may have these parameters: the backend waits
CUSTOM_INFER_DELAY_NS and CUSTOM_OUTPUT_DELAY_NS before each response, it does not send the last CUSTOM_EMPTY_COUNT
responses, and the CUSTOM_FAIL_COUNT responses before these are errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.config_requirements import ExpectedTensor, check_tensors
from backends.streaming import StreamingBackend
from backends.worker.request import OutputValue
from kernel.errors import InvalidArgument, UnknownError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError


class SquareBackend(StreamingBackend):
    """Sends n responses to a request with n, and no response if n is below 1."""

    shares_worker = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._infer_delay_s = self._output_delay_s = 0.0
        self._fail_count = self._empty_count = 0

    def load(self, arguments: ModelArguments) -> None:
        check_tensors(arguments.config, [ExpectedTensor("IN", "INT32")], [ExpectedTensor("OUT", "INT32")])
        self._infer_delay_s = _number(arguments, "CUSTOM_INFER_DELAY_NS") / 1e9
        self._output_delay_s = _number(arguments, "CUSTOM_OUTPUT_DELAY_NS") / 1e9
        self._fail_count = _number(arguments, "CUSTOM_FAIL_COUNT")
        self._empty_count = _number(arguments, "CUSTOM_EMPTY_COUNT")

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        for request in requests:
            self.respond_in_thread(request)

    def responses(self, request: WorkerRequest) -> Iterator[list[OutputValue] | ServingError | None]:
        view = request.input("IN")
        assert view is not None, "the model has no optional inputs"
        given = view.as_numpy()
        if given.size != 1:  # for several rows the number of responses is not defined
            raise InvalidArgument("unexpected shape for IN input")
        count = int(given.item())
        for index in range(count):
            self.pause(request, self._infer_delay_s)
            if index >= count - self._empty_count:
                yield None
                continue
            self.pause(request, self._output_delay_s)
            if index >= count - self._empty_count - self._fail_count:
                yield UnknownError("simulated failure")
            else:
                yield [OutputValue("OUT", "INT32", given)]


def _number(arguments: ModelArguments, key: str) -> int:
    """Return a parameter of the model; as in Triton, 0 if it is absent or not a number."""
    text = arguments.parameter(key) or ""
    return int(text) if text.isascii() and text.isdigit() else 0
