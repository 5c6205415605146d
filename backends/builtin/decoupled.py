"""The repeat backend of Triton's examples: it sends one response for each element of a vector, each after a delay.

Input IN has the values, DELAY the milliseconds before each response, and WAIT the milliseconds after which the
instance takes the next request; this may be before the last response. Output OUT is the value, IDX its index.

The square backend of Triton's examples: it sends n responses with the value n, so the sum is the square of n.

Input IN and output OUT are one INT32. For tests, a model may have these parameters: the backend waits
CUSTOM_INFER_DELAY_NS and CUSTOM_OUTPUT_DELAY_NS before each response, it does not send the last CUSTOM_EMPTY_COUNT
responses, and the CUSTOM_FAIL_COUNT responses before these are errors.

Checks that a model has exactly the tensors that its backend requires, in the required order. Pure.

Triton's repeat and square backends have the same texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from backends.streaming import StreamingBackend
from backends.worker.request import OutputValue
from kernel.errors import InvalidArgument, UnknownError
from kernel.serving.validation import shape_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from backends.base import Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError
    from shm.tensor import Tensor

_ORDINALS = ("first", "second", "third")


class ExpectedTensor(msgspec.Struct, frozen=True):
    """An input or output that a model must have."""

    name: str
    #: As in `TYPE_INT32`, without `TYPE_`.
    datatype: str
    #: None for one dimension of any size.
    dims: tuple[int, ...] | None = (1,)


def check_tensors(
    config: Mapping[str, Any], inputs: Sequence[ExpectedTensor], outputs: Sequence[ExpectedTensor]
) -> None:
    """Raise `InvalidArgument` unless the model has exactly these tensors, in this order."""
    for kind, expected in (("input", inputs), ("output", outputs)):
        count = len(config.get(kind, ()))
        if count != len(expected):
            raise InvalidArgument(f"expected {len(expected)} {kind}{'s'[: len(expected) > 1]}, got {count}")
    for kind, expected in (("input", inputs), ("output", outputs)):
        for ordinal, tensor, given in zip(_ORDINALS, expected, config[kind], strict=False):
            if given["name"] != tensor.name:
                raise InvalidArgument(f"expected {ordinal} {kind} tensor name to be {tensor.name}, got {given['name']}")
    pairs = [*_pairs(config, "input", inputs), *_pairs(config, "output", outputs)]
    for tensor, given in pairs:
        _check_dims(tensor, dims_of(given))
    for tensor, given in pairs:
        if given["data_type"] != f"TYPE_{tensor.datatype}":
            raise InvalidArgument(f"expected {tensor.name} datatype to be {tensor.datatype}, got {given['data_type']}")


def dims_of(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dimensions of a tensor in a configuration; protobuf's JSON writes them as strings."""
    return tuple(int(dim) for dim in tensor.get("dims", ()))


def _pairs(
    config: Mapping[str, Any], kind: str, expected: Sequence[ExpectedTensor]
) -> Iterator[tuple[ExpectedTensor, Mapping[str, Any]]]:
    return zip(expected, config[kind], strict=True)


def _check_dims(tensor: ExpectedTensor, dims: tuple[int, ...]) -> None:
    if tensor.dims is None:
        if len(dims) != 1:
            raise InvalidArgument(f"expected {tensor.name} shape to have one dimension, got {shape_text(dims)}")
    elif dims != tensor.dims:
        raise InvalidArgument(f"expected {tensor.name} shape to be {shape_text(tensor.dims)}, got {shape_text(dims)}")


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
