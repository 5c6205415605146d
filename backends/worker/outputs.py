"""Where a worker's outputs go: into the message, the worker's own memory, an input, or the client's region."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.worker.classification import classify
from kernel.errors import InternalError, ServingError
from shm.arena import INLINE_LIMIT
from shm.arrays import NUMPY_TYPES, RAW_TYPES, to_bytes
from shm.datatypes import element_count
from shm.tensor import RequestedOutput, Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.worker.inputs import InputReader
    from backends.worker.memory import AttachedRegions
    from backends.worker.output_memory import OutputMemory
    from backends.worker.request import OutputValue, WorkerRequest
    from shm.arrays import Array

_ANY_OUTPUT = RequestedOutput("")


class OutputWriter:
    """Turns arrays of outputs into tensors in their places. Callable from any thread."""

    def __init__(self, regions: AttachedRegions, inputs: InputReader, memory: OutputMemory) -> None:
        self.memory = memory
        self._regions = regions
        self._inputs = inputs
        self._main_thread = threading.get_ident()
        #: Whether the model's outputs have a batch dimension, and the labels of its outputs.
        self.batched = False
        self.labels: Mapping[str, Sequence[str]] = {}

    def reserve(self, request: WorkerRequest, name: str, datatype: str, shape: Sequence[int]) -> Array | None:
        """See `WorkerRequest.reserve`."""
        asked = _asked(request, name)
        dtype = NUMPY_TYPES.get(datatype if datatype != "BF16" else "UINT16")
        if asked is None or asked.classification or dtype is None or dtype.hasobject:
            return None
        byte_size = element_count(shape) * dtype.itemsize
        if asked.span is not None:
            if byte_size > asked.span.byte_size:
                return None
        elif byte_size <= INLINE_LIMIT:
            return None
        self._free_reserved(request, name)
        ref, view = self._place(name, datatype, list(shape), byte_size, asked)
        array = np.frombuffer(view, dtype=dtype).reshape(shape)
        request.reserved[name] = (array, ref)
        return array

    def write(self, request: WorkerRequest, outputs: Sequence[OutputValue], *, pass_on: bool = False) -> list[Tensor]:
        """Return the references of those outputs that the client asked for, which are in their places now.

        With `pass_on`, an output that is an input of the request, or a part of one, may stay where it is in the
        kernel's arena, where the main thread answers. What is raised, a `ServingError`, leaves no block behind.
        """
        refs: list[Tensor] = []
        wanted = request.ref.outputs
        try:
            for output in outputs:
                name, array = output.name, output.array
                asked = _ANY_OUTPUT
                if wanted:  # as `_asked`, without a call for each output
                    for asked in wanted:
                        if asked.name == name:
                            break
                    else:
                        continue
                if (
                    asked.span is None
                    and array.nbytes <= INLINE_LIMIT
                    and array.dtype in RAW_TYPES
                    and not asked.classification
                    and not request.reserved
                ):
                    # The usual one, a small tensor, is in the message with this; all others take the call.
                    refs.append(Tensor(name, output.datatype, list(array.shape), array.tobytes()))
                else:
                    refs.append(self._write_asked(request, output, asked, pass_on))
        except ServingError:
            for ref in refs:
                self._free_ref(ref)
            raise
        self.memory.publish(refs)
        return refs

    def _write_asked(
        self, request: WorkerRequest, output: OutputValue, asked: RequestedOutput, pass_on: bool
    ) -> Tensor:
        name, datatype, array = output.name, output.datatype, output.array
        if asked.classification:
            array = classify(array, datatype, asked.classification, self.labels.get(name, ()), batched=self.batched)
            datatype = "BYTES"
        reserved = request.reserved.pop(name, None) if request.reserved else None
        if reserved is not None:
            place, ref = reserved
            if array is not place and array.shape == place.shape and array.dtype == place.dtype:
                place[...] = array
                return ref
            if array is place:
                return ref
            self._free_ref(ref)
        # Threads of the model may go on with an input when they have answered.
        if (
            pass_on
            and asked.span is None
            and array.nbytes > INLINE_LIMIT
            and threading.get_ident() == self._main_thread
        ):
            span = self._inputs.place_in_inputs(request, array)
            if span is not None:
                return Tensor(name, datatype, list(array.shape), None, span)
        return self._write_new(name, datatype, array, asked)

    def _write_new(self, name: str, datatype: str, array: Array, asked: RequestedOutput) -> Tensor:
        shape = list(array.shape)
        data = to_bytes(array)
        byte_size = len(data)
        if asked.span is None and byte_size <= INLINE_LIMIT:
            return Tensor(name, datatype, shape, bytes(data))
        if asked.span is not None and byte_size > asked.span.byte_size:
            raise InternalError(
                f"shared memory size specified with the request for output '{name}' ({asked.span.byte_size} bytes) "
                f"should be at least {byte_size} bytes to hold the results"
            )
        ref, view = self._place(name, datatype, shape, byte_size, asked)
        view[:] = data
        return ref

    def _place(
        self, name: str, datatype: str, shape: list[int], byte_size: int, asked: RequestedOutput
    ) -> tuple[Tensor, memoryview]:
        wanted = asked.span
        region = None if wanted is None else self._regions.find(wanted.lease.region_number)
        if wanted is None or region is None:  # without shared memory the kernel passes it on to the client's region
            span, view = self.memory.take(byte_size)
        else:
            span = Span(wanted.lease, wanted.offset, byte_size)
            view = region.view(wanted.offset, byte_size)
        return Tensor(name, datatype, shape, None, span), view

    def copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors with copies of those that were left in inputs. Raises `ServingError`."""
        copies: list[Tensor] = []
        for tensor in tensors:
            span = tensor.span
            if span is None or self.memory.owns(span) or not self._regions.get(span.lease.region_number).shared:
                copies.append(tensor)
                continue
            copy, view = self._place(tensor.name, tensor.datatype, tensor.shape, span.byte_size, _ANY_OUTPUT)
            view[:] = self._regions.get(span.lease.region_number).view(span.offset, span.byte_size)
            copies.append(copy)
        return copies

    # ---- giving back -------------------------------------------------------------------------

    def free_reserved(self, request: WorkerRequest) -> None:
        """Free what was reserved and not used."""
        for name in list(request.reserved):
            self._free_reserved(request, name)

    def _free_reserved(self, request: WorkerRequest, name: str) -> None:
        reserved: tuple[Any, Tensor] | None = request.reserved.pop(name, None)
        if reserved is not None:
            self._free_ref(reserved[1])

    def _free_ref(self, ref: Tensor) -> None:
        if ref.span is not None and self.memory.owns(ref.span):
            self.memory.drop(ref.span)


def _asked(request: WorkerRequest, name: str) -> RequestedOutput | None:
    """Return how the client wants an output, None where it wants others only."""
    if not request.ref.outputs:
        return _ANY_OUTPUT
    for output in request.ref.outputs:
        if output.name == name:
            return output
    return None
