"""Where a worker's outputs go: into the message, a block of its own arena, or the client's region.

One process allocates in an arena, and here it is the worker: the kernel only reads, and says which
blocks it has done with.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.transport import wire
from backends.worker.classification import classify
from backends.worker.inputs import place_in_inputs
from kernel.errors import ArenaFull, InternalError, ServingError
from shm.arena import INLINE_LIMIT, Arena, Block
from shm.arrays import NUMPY_TYPES, RAW_TYPES, to_bytes
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.worker.memory import AttachedRegions
    from backends.worker.request import OutputValue, WorkerRequest
    from shm.arrays import Array

_ANY_OUTPUT = wire.OutputRef("")


class OutputWriter:
    """Turns output arrays into references. Callable from any thread."""

    def __init__(self, regions: AttachedRegions, on_arena: Callable[[Arena], None]) -> None:
        self._regions = regions
        self._on_arena = on_arena
        self._arena: Arena | None = None
        self._blocks: dict[int, Block] = {}
        self._lock = threading.Lock()
        self._main_thread = threading.get_ident()
        self.arena_byte_size = 1 << 34
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
        if asked.region >= 0:
            if byte_size > asked.byte_size:
                return None
        elif byte_size <= INLINE_LIMIT:
            return None
        self._free_reserved(request, name)
        ref, view = self._place(name, datatype, list(shape), byte_size, asked)
        array = np.frombuffer(view, dtype=dtype).reshape(shape)
        request.reserved[name] = (array, ref)
        return array

    def write(
        self, request: WorkerRequest, outputs: Sequence[OutputValue], *, pass_on: bool = False
    ) -> list[wire.TensorRef]:
        """Return the references of those outputs that the client asked for, which are in their places now.

        With `pass_on`, an output that is an input of the request, or a part of one, may stay where it is in the
        kernel's arena, where the main thread answers. What is raised, a `ServingError`, leaves no block behind.
        """
        refs: list[wire.TensorRef] = []
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
                    asked.region < 0
                    and array.nbytes <= INLINE_LIMIT
                    and array.dtype in RAW_TYPES
                    and not asked.classification
                    and not request.reserved
                ):
                    # The usual one, a small tensor, is in the message with this; all others take the call.
                    refs.append(wire.TensorRef(name, output.datatype, list(array.shape), array.tobytes()))
                else:
                    refs.append(self._write_asked(request, output, asked, pass_on))
        except ServingError:
            for ref in refs:
                self._free_ref(ref)
            raise
        return refs

    def _write_asked(
        self, request: WorkerRequest, output: OutputValue, asked: wire.OutputRef, pass_on: bool
    ) -> wire.TensorRef:
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
        if pass_on and asked.region < 0 and array.nbytes > INLINE_LIMIT and threading.get_ident() == self._main_thread:
            passed = place_in_inputs(request, array)
            if passed is not None:
                return wire.TensorRef(name, datatype, list(array.shape), None, *passed, array.nbytes)
        return self._write_new(name, datatype, array, asked)

    def _write_new(self, name: str, datatype: str, array: Array, asked: wire.OutputRef) -> wire.TensorRef:
        shape = list(array.shape)
        data = to_bytes(array)
        byte_size = len(data)
        if asked.region < 0 and byte_size <= INLINE_LIMIT:
            return wire.TensorRef(name, datatype, shape, bytes(data))
        if asked.region >= 0 and byte_size > asked.byte_size:
            raise InternalError(
                f"shared memory size specified with the request for output '{name}' ({asked.byte_size} bytes) "
                f"should be at least {byte_size} bytes to hold the results"
            )
        ref, view = self._place(name, datatype, shape, byte_size, asked)
        view[:] = data
        return ref

    def _place(
        self, name: str, datatype: str, shape: list[int], byte_size: int, asked: wire.OutputRef
    ) -> tuple[wire.TensorRef, memoryview]:
        if asked.region >= 0:
            view = self._regions.view(asked.region, asked.offset, byte_size)
            return wire.TensorRef(name, datatype, shape, None, asked.region, asked.offset, byte_size, True), view
        with self._lock:
            block = self._arena_of_mine().take(byte_size)
            if block is None:
                raise ArenaFull(byte_size)
            self._blocks[block.offset] = block
        return wire.TensorRef(name, datatype, shape, None, wire.OUTPUT_ARENA, block.offset, byte_size), block.view()

    def _arena_of_mine(self) -> Arena:
        if self._arena is None:
            self._arena = Arena(f"naiad outputs {os.getpid()}", self.arena_byte_size)
            self._on_arena(self._arena)
        return self._arena

    def copied(self, refs: Sequence[wire.TensorRef]) -> list[wire.TensorRef]:
        """Return the references with copies of what was passed on. Raises `ServingError`."""
        copies: list[wire.TensorRef] = []
        for ref in refs:
            if ref.data is not None or ref.region == wire.OUTPUT_ARENA or ref.foreign:
                copies.append(ref)
                continue
            copy, view = self._place(ref.name, ref.datatype, ref.shape, ref.byte_size, _ANY_OUTPUT)
            view[:] = self._regions.view(ref.region, ref.offset, ref.byte_size)
            copies.append(copy)
        return copies

    # ---- giving back -------------------------------------------------------------------------

    def free(self, offsets: Sequence[int]) -> None:
        """Free blocks that the kernel has done with."""
        with self._lock:
            for offset in offsets:
                self._blocks.pop(offset).release()

    def free_reserved(self, request: WorkerRequest) -> None:
        """Free what was reserved and not used."""
        for name in list(request.reserved):
            self._free_reserved(request, name)

    def _free_reserved(self, request: WorkerRequest, name: str) -> None:
        reserved: tuple[Any, wire.TensorRef] | None = request.reserved.pop(name, None)
        if reserved is not None:
            self._free_ref(reserved[1])

    def _free_ref(self, ref: wire.TensorRef) -> None:
        if ref.region == wire.OUTPUT_ARENA and ref.data is None:
            self.free([ref.offset])


def _asked(request: WorkerRequest, name: str) -> wire.OutputRef | None:
    """Return how the client wants an output, None where it wants others only."""
    if not request.ref.outputs:
        return _ANY_OUTPUT
    for output in request.ref.outputs:
        if output.name == name:
            return output
    return None
