"""The repeat backend of Triton's examples: it sends one response for each element of a vector, each after a delay.

Input IN has the values, DELAY the milliseconds before each response, and WAIT the milliseconds after which the
instance takes the next request; this may be before the last response. Output OUT is the value, IDX its index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.config_requirements import ExpectedTensor, check_tensors, dims_of
from backends.streaming import StreamingBackend
from backends.worker.request import OutputValue
from kernel.errors import InvalidArgument
from kernel.serving.validation import shape_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import ModelArguments, Timings
    from backends.worker.request import WorkerRequest
    from shm.tensor import Tensor

_INPUTS = (
    ExpectedTensor("IN", "INT32", dims=None),
    ExpectedTensor("DELAY", "UINT32", dims=None),
    ExpectedTensor("WAIT", "UINT32"),
)
_OUTPUTS = (ExpectedTensor("OUT", "INT32"), ExpectedTensor("IDX", "UINT32"))


class RepeatBackend(StreamingBackend):
    """Returns its input, one element per response."""

    shares_worker = True

    def load(self, arguments: ModelArguments) -> None:
        if arguments.max_batch_size:
            raise InvalidArgument("repeat backend only supports models with max_batch_size == 0")
        check_tensors(arguments.config, _INPUTS, _OUTPUTS)
        values, delays, _ = (dims_of(tensor) for tensor in arguments.config["input"])
        _check_same(values, delays)

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        for request in requests:
            _check_same(_input(request, "IN").shape, _input(request, "DELAY").shape)
            cancelled = self.respond_in_thread(request)
            cancelled.wait(int(_input(request, "WAIT").as_numpy()[0]) / 1000)

    def responses(self, request: WorkerRequest) -> Iterator[list[OutputValue]]:
        delays = _input(request, "DELAY").as_numpy()
        for index, value in enumerate(_input(request, "IN").as_numpy()):
            self.pause(request, int(delays[index]) / 1000)
            yield [
                OutputValue("OUT", "INT32", np.array([value], np.int32)),
                OutputValue("IDX", "UINT32", np.array([index], np.uint32)),
            ]


def _check_same(values: Sequence[int], delays: Sequence[int]) -> None:
    if values != delays:
        raise InvalidArgument(
            f"expected IN and DELAY shape to match, got {shape_text(values)} and {shape_text(delays)}"
        )


def _input(request: WorkerRequest, name: str) -> Tensor:
    view = request.input(name)
    assert view is not None, "the model has no optional inputs"
    return view
