"""The square backend of Triton's examples: n responses of n, so that a request costs what its square does.

Input IN and output OUT have one INT32. For tests a model may have parameters: CUSTOM_INFER_DELAY_NS and
CUSTOM_OUTPUT_DELAY_NS are waited before each response, the last CUSTOM_EMPTY_COUNT responses are not sent, and
the CUSTOM_FAIL_COUNT before those are errors.
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
    """Answers n with n responses, and what is below 1 with none."""

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
            self.answer(request)

    def responses(self, request: WorkerRequest) -> Iterator[list[OutputValue] | ServingError]:
        view = request.input("IN")
        assert view is not None, "no input of the model is optional"
        given = view.as_numpy()
        if given.size != 1:  # a batch: what would be the length of its answer?
            raise InvalidArgument("unexpected shape for IN input")
        count = int(given.item())
        for index in range(count):
            self.pause(request, self._infer_delay_s)
            if index >= count - self._empty_count:
                continue
            self.pause(request, self._output_delay_s)
            if index >= count - self._empty_count - self._fail_count:
                yield UnknownError("simulated failure")
            else:
                yield [OutputValue("OUT", "INT32", given)]


def _number(arguments: ModelArguments, key: str) -> int:
    """Return a parameter of the model; 0 for none, and for what is no number (Triton)."""
    text = arguments.parameter(key) or ""
    return int(text) if text.isascii() and text.isdigit() else 0
