"""Gathers the inputs of a batch in one block of the device, through one pinned block of the host.

What is pinned where it is, is copied from there (`pinning.py`).
"""

from __future__ import annotations

import ctypes
import enum
import logging
from typing import TYPE_CHECKING, Union

import msgspec
import numpy as np

from backends.reshape import input_array
from backends.worker.devices.tensors import DeviceArray, DeviceInput
from kernel.errors import InternalError, InvalidArgument
from shm.arrays import array_address
from shm.cuda import CudaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.reshape import TensorShapes
    from backends.worker.devices.instance_device import DeviceBlock, InstanceDevice
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array
    from shm.tensor import Tensor

logger = logging.getLogger(__name__)

#: A part of an input: one request's, on the host or on a device.
Piece = Union["Array", DeviceArray]

#: Pinned blocks up to this size are powers of two, larger ones multiples of the step.
_MAX_ROUNDED_BYTE_SIZE = 16 << 20
_STEP_BYTE_SIZE = 1 << 20

#: The smallest blocks.
_MIN_BLOCK_BYTE_SIZE = 64 << 10


class CopyStage(enum.Enum):
    """What a copy belongs to."""

    INPUT = "inputs, to where they are read"
    COMPUTATION = "anything else"
    OUTPUT = "outputs, to their places"


def gathered(
    requests: Sequence[WorkerRequest], specs: Mapping[str, TensorShapes]
) -> dict[str, tuple[str, list[Piece]]]:
    """Return name → datatype, and the parts of the requests, in the model's shapes and in order; without BYTES.

    Raises as `backends.batch_tensors.gather`.
    """
    wanted = [(view.name, view.datatype) for view in requests[0].inputs if view.datatype != "BYTES"]
    if any(len(request.inputs) != len(requests[0].inputs) for request in requests):
        raise InternalError("requests of one batch must have the same inputs")
    found: dict[str, tuple[str, list[Piece]]] = {}
    for name, datatype in wanted:
        pieces = []
        for request in requests:
            view = request.input(name)
            if view is None:
                raise InternalError(f"input '{name}' is missing in a request of a batch")
            pieces.append(_piece(view, specs.get(name)))
        if any(piece.shape[1:] != pieces[0].shape[1:] for piece in pieces):
            shapes = ", ".join(str(list(piece.shape)) for piece in pieces)
            raise InternalError(f"input '{name}' has different shapes in requests of one batch: {shapes}")
        found[name] = datatype, pieces
    return found


def _piece(view: Tensor | DeviceInput, spec: TensorShapes | None) -> Piece:
    ragged = spec is not None and spec.ragged
    if not isinstance(view, DeviceInput):
        array = input_array(view, spec)
        return array.reshape(-1) if ragged else array
    if not ragged and (spec is None or spec.reshape is None):  # usual: saves a third of the time for such an input
        return view.array
    try:
        shape = view.shape if spec is None else spec.model_shape(view.shape)
        return view.array.reshape([-1] if ragged else shape)
    except ValueError as error:
        raise InvalidArgument(f"input '{view.name}' does not hold a tensor of shape {view.shape}: {error}") from error


class StagingLimits(msgspec.Struct, frozen=True):
    """How much memory gathered inputs may have, in bytes."""

    #: Pinned on the host. A larger batch is copied from where it is, which takes longer.
    pinned_byte_size: int = 0
    #: Kept on the device between batches, with tensors to other models. A larger batch gets memory of its own.
    kept_byte_size: int = 0


NO_LIMITS = StagingLimits()


class Staging:
    """One block on the device and one pinned block of the host, of the same layout, which grow as batches need."""

    def __init__(self, device: InstanceDevice, limits: StagingLimits) -> None:
        self._device = device
        self._pinned_limit = limits.pinned_byte_size
        self._budget = device.pinned_budget
        self._block: DeviceBlock | None = None
        self._pinned_address = 0
        self._pinned_byte_size = 0

    def fill(self, inputs: Sequence[tuple[str, str, list[Piece]]], alignment: int) -> dict[str, DeviceArray]:
        """Enqueue the copies of all parts. What was filled before is overwritten."""
        device = self._device
        if device.pending:  # the copies of the last batch may still read the pinned block
            device.synchronize()
        offsets, position = [], 0
        for _, _, pieces in inputs:
            position = -(-position // alignment) * alignment
            offsets.append(position)
            position += sum(piece.nbytes for piece in pieces)
        block = self._grown(position)
        pinned = self._pinned(position)
        runs = _Runs(device, block.address, self._pinned_address if pinned else 0)
        found = {}
        for (name, datatype, pieces), start in zip(inputs, offsets):
            offset = start
            for piece in pieces:
                runs.add(piece, offset)
                offset += piece.nbytes
            first = pieces[0]
            shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:]) if first.shape else ()
            found[name] = DeviceArray(block.address + start, datatype, shape, device.device_id, block)
        runs.end()
        device.inputs_enqueued()
        return found

    def _grown(self, byte_size: int) -> DeviceBlock:
        if self._block is not None and self._block.byte_size >= byte_size:
            return self._block
        wanted = 1 << max(byte_size - 1, _MIN_BLOCK_BYTE_SIZE - 1).bit_length()
        kept = 0 if self._block is None else self._block.byte_size
        if wanted - kept > self._device.pool_room:
            return self._device.allocate(byte_size)
        # The old one is freed with the last array over it: arrays of the last batch may still exist.
        self._block = self._device.allocate(wanted)
        self._device.pooled(wanted - kept)
        return self._block

    def _pinned(self, byte_size: int) -> bool:
        """Return whether there is pinned memory for a batch of this many bytes. Allocates it if it can."""
        if byte_size <= self._pinned_byte_size:
            return True
        wanted = 1 << max(byte_size - 1, _MIN_BLOCK_BYTE_SIZE - 1).bit_length()
        if wanted > _MAX_ROUNDED_BYTE_SIZE:  # pinned memory is scarce: twice of a large batch is not for it
            wanted = -(-byte_size // _STEP_BYTE_SIZE) * _STEP_BYTE_SIZE
        if wanted > self._pinned_limit:
            return False
        more = wanted - self._pinned_byte_size
        if not self._budget.take(more):
            if self._device.pinning is not None:
                self._device.pinning.make_room(more)  # for one of the next batches
            return False
        cuda = self._device.cuda
        try:
            if self._pinned_address:
                cuda.free_pinned(self._pinned_address)
                self._pinned_address = self._pinned_byte_size = 0
            self._pinned_address = cuda.allocate_pinned(wanted)
        except CudaError as error:  # no memory may be locked, for example: copies take longer, and work
            logger.warning("%d bytes of pinned memory cannot be allocated: %s", wanted, error)
            self._budget.give(wanted)
            self._pinned_limit = 0
            return False
        self._pinned_byte_size = wanted
        return True

    def close(self) -> None:
        """Free the memory; the block of the device with the last array over it. Raises `CudaError`."""
        self._block = None
        if self._pinned_address:
            self._device.cuda.free_pinned(self._pinned_address)
            self._pinned_address = self._pinned_byte_size = 0


class _Runs:
    """Joins parts that follow one another in the pinned block to one copy."""

    def __init__(self, device: InstanceDevice, target: int, pinned: int) -> None:
        self._device = device
        self._target = target
        self._pinned = pinned
        self._pinning = device.pinning
        self._start = self._end = 0

    def add(self, piece: Piece, offset: int) -> None:
        """Put a part at `offset`."""
        byte_size = piece.nbytes
        if not byte_size:
            return
        if isinstance(piece, DeviceArray):
            crosses = piece.device_id != self._device.device_id
            self._enqueue(self._target + offset, piece.address, byte_size, piece.owner, crosses=crosses)
            return
        source = np.ascontiguousarray(piece)
        address = array_address(source)
        in_place = self._pinning is not None and self._pinning.used(address, byte_size)
        if in_place or not self._pinned:
            self._enqueue(self._target + offset, address, byte_size, source)
        else:
            ctypes.memmove(self._pinned + offset, address, byte_size)
            if offset != self._end:
                self.end()
                self._start = offset
            self._end = offset + byte_size

    def end(self) -> None:
        """Enqueue the copy of the parts since the last one."""
        if self._end > self._start:
            self._enqueue(self._target + self._start, self._pinned + self._start, self._end - self._start)
        self._start = self._end

    def _enqueue(self, target: int, source: int, byte_size: int, kept: object = None, *, crosses: bool = True) -> None:
        self._device.enqueue(target, source, byte_size, kept, crosses=crosses, stage=CopyStage.INPUT)
