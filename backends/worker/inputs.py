"""The inputs of a worker's requests: in the message that brought them, in an arena, or in a client's region."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.worker.request import InputView
from backends.worker.strings_check import check_strings
from kernel.errors import ServingError
from shm.arrays import RAW_TYPES

if TYPE_CHECKING:
    from backends.transport import wire
    from backends.worker.held import HeldInputs
    from backends.worker.memory import AttachedRegions
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


class InputReader:
    """Gives requests their inputs. `model_name` is for the texts of errors."""

    def __init__(self, regions: AttachedRegions, held: HeldInputs) -> None:
        self._regions = regions
        self._held = held
        self.model_name = ""
        #: Whether to copy what lies in a client's region, because the model keeps its inputs.
        self.copies_foreign = False

    def read(self, requests: list[WorkerRequest]) -> list[WorkerRequest]:
        """Return those requests that have their inputs now; the others are answered, because theirs are not usable."""
        usable = True
        for request in requests:
            inputs = request.inputs
            try:
                for ref in request.ref.inputs:
                    if ref.data is not None and ref.datatype != "BYTES":  # usual, so without a call
                        view = InputView(ref.name, ref.datatype, ref.shape, memoryview(ref.data), ref.foreign)
                    else:
                        view = self._view(ref, request)
                    inputs.append(view)
            except ServingError as error:
                request.fail(error)
                usable = False
        return requests if usable else [request for request in requests if not request.finished]

    def _view(self, ref: wire.TensorRef, request: WorkerRequest) -> InputView:
        foreign = ref.foreign
        if ref.data is not None:
            data = memoryview(ref.data)
        else:
            data = self._regions.view(ref.region, ref.offset, ref.byte_size)
            # The client can change string lengths between our check and our use: take a copy.
            if foreign and (self.copies_foreign or ref.datatype == "BYTES"):
                data, foreign = memoryview(bytearray(data)), False
            else:
                data = self._held.watch(request.ref.number, data, foreign=foreign)
                data = data.toreadonly() if foreign else data
        view = InputView(ref.name, ref.datatype, ref.shape, data, foreign)
        if ref.datatype == "BYTES":
            check_strings(view, request.id, self.model_name)
        return view


def place_in_inputs(request: WorkerRequest, array: Array) -> tuple[int, int] | None:
    """Return where `array` lies if that is within an input in the kernel's arena: the region, and the offset there."""
    if not array.flags.c_contiguous or array.dtype not in RAW_TYPES:
        return None
    start = address_of(array)
    for ref, view in zip(request.ref.inputs, request.inputs, strict=True):
        if ref.data is None and not ref.foreign:
            skip = start - address_of(np.asarray(view.data))
            if 0 <= skip <= ref.byte_size - array.nbytes:
                return ref.region, ref.offset + skip
    return None


def address_of(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
