"""Reads the inputs of a worker's requests: from the message, an arena, or a client's region.

Checks that the bytes of a BYTES input match its shape. Texts are Triton's (infer_request.cc).

The worker checks, because the kernel does not read client memory.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from kernel.errors import InvalidArgument, InvalidRequest, ServingError, request_prefix
from shm.arrays import RAW_TYPES, array_address
from shm.datatypes import DATATYPES, element_count
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.worker.held_inputs import HeldInputs
    from backends.worker.memory import AttachedRegions, WorkerRegion
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


class InputReader:
    """Sets the inputs of requests. `model_name` is for error texts."""

    def __init__(self, regions: AttachedRegions, held: HeldInputs) -> None:
        self._regions = regions
        self._held = held
        self.model_name = ""
        #: Whether inputs in a client's region are copied, because the model has held such an input.
        self.copies_volatile = False
        #: Makes inputs on a device of those in regions there; only for a backend that takes them (`device_inputs`).
        self.on_device: Callable[[Tensor, Span, WorkerRegion, int], Tensor | None] | None = None
        #: How many inputs were copied to be read, and their bytes.
        self.copies = self.copied_byte_size = 0

    def read(self, requests: list[WorkerRequest]) -> list[WorkerRequest]:
        """Set `inputs` of the requests. Returns those with valid inputs; the others have failed."""
        all_valid = True
        for request in requests:
            inputs = request.inputs
            try:
                for tensor in request.ref.inputs:
                    if tensor.data is not None and tensor.datatype != "BYTES":  # the usual case, without a call
                        inputs.append(tensor)
                    else:
                        inputs.append(self._resolved(tensor, request))
            except ServingError as error:
                request.fail(error)
                all_valid = False
        return requests if all_valid else [request for request in requests if not request.finished]

    def _resolved(self, tensor: Tensor, request: WorkerRequest) -> Tensor:
        """Return a copy of `tensor` with its bytes in `data`. The message's tensor gets no view of them."""
        data = tensor.data
        if data is None:
            assert tensor.span is not None, f"input '{tensor.name}' has no place"
            if self.on_device is not None:
                region = self._regions.get(tensor.span.lease.region_number)
                found = self.on_device(tensor, tensor.span, region, request.ref.number)
                if found is not None:
                    return found
            data = self._view(tensor, tensor.span, request)
        resolved = Tensor(tensor.name, tensor.datatype, tensor.shape, data)
        if tensor.datatype == "BYTES":
            check_strings(resolved, request.id, self.model_name)
        return resolved

    def _view(self, tensor: Tensor, span: Span, request: WorkerRequest) -> memoryview:
        """Return the bytes of an input in shared memory."""
        region = self._regions.get(span.lease.region_number)
        # Another process could change string lengths after the check: copy the bytes. A tensor that the kernel left
        # where it was received may begin anywhere, and many models need it aligned.
        if (
            (tensor.datatype == "BYTES" and not region.steady)
            or (region.volatile and self.copies_volatile)
            or not is_aligned(tensor, span)
        ):
            self._count(span)
            return memoryview(bytearray(region.view(span.offset, span.byte_size)))
        if region.private:
            if not region.in_place:
                self._count(span)
            return region.input_view(span.offset, span.byte_size)
        view = self._held.watch(request.ref.number, region, span.offset, span.byte_size)
        if type(view.obj) is bytearray:  # another request uses the same pages, and its model may have changed them
            self._count(span)
        return view

    def _count(self, span: Span) -> None:
        self.copies += 1
        self.copied_byte_size += span.byte_size

    def place_in_inputs(self, request: WorkerRequest, array: Array) -> Span | None:
        """Return the span of `array` if it is a part of an input in an arena, where it can stay; else None.

        In the arena of another worker it can if the model has not changed it.
        """
        if not array.flags.c_contiguous or array.dtype not in RAW_TYPES:
            return None
        start = array_address(array)
        for ref, tensor in zip(request.ref.inputs, request.inputs):  # controls and states follow
            span = ref.span
            if span is not None and is_aligned(ref, span) and type(tensor) is Tensor:
                skip = start - array_address(np.asarray(tensor.data))
                fits = 0 <= skip <= span.byte_size - array.nbytes
                if fits and self._regions.get(span.lease.region_number).seen_by_all(start, array.nbytes):
                    return Span(span.lease, span.offset + skip, array.nbytes)
        return None


def is_aligned(tensor: Tensor, span: Span) -> bool:
    """Whether the elements of `tensor` begin at multiples of their size. If not, the worker uses a copy."""
    return span.offset % (DATATYPES[tensor.datatype].byte_size or 1) == 0


_LENGTH = struct.Struct("<I")


def check_strings(tensor: Tensor, request_id: str, model: str) -> None:
    """Raise `InvalidArgument` or `InvalidRequest` unless `tensor` holds exactly the elements of its shape."""
    wanted = element_count(tensor.shape)
    found = position = 0
    data = tensor.data
    assert data is not None
    end = len(data)
    where = f"for inference input '{tensor.name}' for model '{model}'"
    while position < end:
        if end - position < 4:
            raise InvalidRequest(
                f"{request_prefix(request_id)}incomplete string length indicator {where}, expecting 4 bytes but "
                f"only {end - position} bytes available. Please make sure the string length indicator is in one "
                "buffer."
            )
        if found >= wanted:
            raise InvalidRequest(
                f"{request_prefix(request_id)}unexpected number of string elements {found + 1} {where}, "
                f"expecting {wanted}"
            )
        (length,) = _LENGTH.unpack_from(data, position)
        position += 4
        if length > end - position:
            raise InvalidArgument(  # the text of Triton's backends, which detect this (backend_common.cc)
                f"incomplete string data for inference input '{tensor.name}', expecting string of length {length} "
                f"but only {end - position} bytes available"
            )
        position += length
        found += 1
    if found != wanted:
        raise InvalidRequest(f"{request_prefix(request_id)}expected {wanted} string elements {where}, got {found}")
