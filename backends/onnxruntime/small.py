"""Small batches of a model whose tensors have one shape each: run in memory that is bound to the session for good.

Copying 64 bytes costs less than making an array of them: an add_sub of 16 numbers takes 2.7 µs so, where a plain
run takes 5.8 with its arrays. Only on the CPU: for other devices inputs are copied once, when they are bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from backends.onnxruntime.errors import ORT_ERRORS
from backends.worker.request import OutputValue
from shm.arena import INLINE_LIMIT
from shm.arrays import NUMPY_TYPES
from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from backends.base import Timings
    from backends.onnxruntime.binding import BoundSession
    from backends.onnxruntime.tensors import OnnxSignature
    from backends.reshape import TensorShapes
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array

#: Each number of rows is bound when a batch first has it, and that binding kept: a few kilobytes.
_MOST_ROWS = 64


class _Place(msgspec.Struct, frozen=True):
    """The memory of one input or output, for as many rows as a small batch can have."""

    name: str
    datatype: str
    #: Shape of one row; of the whole tensor where the model does not batch.
    dims: list[int]
    row_byte_size: int
    array: Array
    #: The same memory as bytes.
    memory: memoryview


class _Bound(msgspec.Struct, frozen=True):
    """Batches of one number of rows: what runs them, and all of their outputs."""

    run: Callable[[], None]
    outputs: list[OutputValue]


class SmallBatches:
    """Runs small batches that want all outputs. Owns the memory of their inputs and outputs."""

    def __init__(
        self,
        session: BoundSession,
        inputs: Iterable[TensorShapes],
        outputs: Iterable[TensorShapes],
        max_batch_size: int,
    ) -> None:
        """`inputs` and `outputs` are tensors for which `can_be_small` is true."""
        self._session = session
        self._batched = max_batch_size > 0
        specs = [*inputs, *outputs]
        largest = max(_row_byte_size(spec) for spec in specs)
        self._most_rows = min(max_batch_size, _MOST_ROWS, INLINE_LIMIT // largest) if self._batched else 1
        self._inputs = [_place(spec, self._most_rows) for spec in inputs]
        self._outputs = [_place(spec, self._most_rows) for spec in outputs]
        self._bound: dict[int, _Bound] = {}
        #: Whether the last run failed: for its inputs, or because outputs have other shapes than the file declares.
        self.failed = False

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> bool:
        """Answer the requests; or return False, with none answered: no small batch, or the run failed."""
        self.failed = False
        ends = self._gather(requests)
        if ends is None:
            return False
        row_count = ends[-1]
        # As `inputs_ready` and `inferred`, without a call for each.
        timings.inputs_ready_ns = timings.inferred_ns = timings.clock()
        try:
            bound = self._bound.get(row_count) or self._bind(row_count)
            bound.run()
        except ORT_ERRORS:
            self.failed = True
            return False
        timings.inferred_ns = timings.clock()
        if len(requests) == 1:
            requests[0].respond(bound.outputs)
        else:
            self._scatter(requests, ends)
        return True

    def _gather(self, requests: Sequence[WorkerRequest]) -> list[int] | None:
        """Copy the inputs to their places, and return behind which row those of each request end.

        None where anything about them is unusual: the general way serves them, or says what is wrong.
        """
        # One loop for all of it: a call for each request or input would cost more than what it does.
        places, batched = self._inputs, self._batched
        ends: list[int] = []
        end = 0
        for request in requests:
            views = request.inputs
            if len(views) != len(places) or (request.ref.outputs and not self._wants_all(request)):
                return None
            size = views[0].shape[0] if batched else 1
            start, end = end, end + size
            if size < 1 or end > self._most_rows:
                return None
            for index, place in enumerate(places):
                view = views[index]
                if view.name != place.name:  # in an order of the client's own
                    found = request.input(place.name)
                    if found is None:
                        return None
                    view = found
                width = place.row_byte_size
                shape = [size, *place.dims] if batched else place.dims
                data = view.data
                if data is None or view.shape != shape or view.datatype != place.datatype or len(data) != size * width:
                    return None
                place.memory[start * width : end * width] = data
            ends.append(end)
        return ends

    def _wants_all(self, request: WorkerRequest) -> bool:
        """Whether the client asked for every output: what nobody wants is not to be computed."""
        asked = request.ref.outputs
        if len(asked) < len(self._outputs):
            return False
        for output, place in zip(asked, self._outputs, strict=False):
            # Those who name all of them do so in their order, mostly: without a call for each.
            if output.name != place.name and not request.wants(place.name):
                return False
        return True

    def _scatter(self, requests: Sequence[WorkerRequest], ends: Sequence[int]) -> None:
        start = 0
        for request, end in zip(requests, ends, strict=True):
            request.respond(self._answer(slice(start, end)))
            start = end

    def _answer(self, rows: slice) -> list[OutputValue]:
        return [OutputValue(place.name, place.datatype, place.array[rows]) for place in self._outputs]

    def _bind(self, row_count: int) -> _Bound:
        # A model that does not batch has its whole tensors in one row, whose dimension is not the model's.
        rows = slice(row_count) if self._batched else slice(None)
        run = self._session.bound(
            {place.name: place.array[rows] for place in self._inputs},
            {place.name: place.array[rows] for place in self._outputs},
        )
        bound = self._bound[row_count] = _Bound(run, self._answer(rows))
        return bound


def can_be_small(spec: TensorShapes, signature: OnnxSignature) -> bool:
    """Whether a tensor of the model has the same one shape in all batches, but for their size, and is not large."""
    declared = signature.inputs.get(spec.name) or signature.outputs.get(spec.name)
    return (
        declared is not None
        and bool(declared.dims)  # empty for scalars, and where any rank will do
        and has_known_shape(spec)
        and 0 < _row_byte_size(spec) <= INLINE_LIMIT  # strings have none
    )


def has_known_shape(spec: TensorShapes) -> bool:
    """Whether clients and model see the same tensor, whose dimensions are known but for the batch's."""
    return spec.reshape is None and spec.shaped_like is None and not spec.ragged and -1 not in spec.dims


def _row_byte_size(spec: TensorShapes) -> int:
    return element_count(spec.dims) * DATATYPES[spec.datatype].byte_size


def _place(spec: TensorShapes, row_count: int) -> _Place:
    dtype = NUMPY_TYPES["UINT16" if spec.datatype == "BF16" else spec.datatype]
    array = np.zeros((row_count, *spec.dims) if spec.batched else spec.dims, dtype)
    memory = array.reshape(-1).view(np.uint8).data
    return _Place(spec.name, spec.datatype, list(spec.dims), _row_byte_size(spec), array, memory)
