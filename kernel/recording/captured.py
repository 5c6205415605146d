"""Captures the tensors of requests and responses for the recorder.

Inputs are copied, because models may change theirs. Outputs do not change: large ones stay where they are under leases
of their own, and the writer reads them there. The kernel never reads regions of clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.recording.format import RecordedOutput, RecordedTensor
from kernel.recording.settings import MOST_TENSOR_BYTE_SIZE
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shm.arena import Block
    from shm.tensor import RequestedOutput

#: Larger inputs are copied for the writer into memory that it shares, not into the message to it.
_INLINE_LIMIT = 4096

TOO_LARGE = "larger than the recorder's limit"
NO_MEMORY = "no memory was left for the recorder"


class Captured(msgspec.Struct, eq=False):
    """The tensors of one record, and what the writer reads for it. The holder releases the sources."""

    tensors: list[RecordedTensor] = []
    #: With leases of their own.
    sources: list[Tensor] = []

    def release(self) -> None:
        """Release the sources."""
        for source in self.sources:
            source.release()


class InputCapture:
    """Copies inputs."""

    def __init__(self, limit: int, digests: bool, memory: Callable[[int], Block]) -> None:
        """Inputs of more than `limit` bytes are left out. `memory` returns a block that the writer can read."""
        self._limit = limit
        self._digests = digests
        self._memory = memory

    def capture(self, inputs: Sequence[Tensor]) -> Captured:
        """Return copies of the inputs of a request. Of one request at most `MOST_TENSOR_BYTE_SIZE` are copied."""
        found = Captured()
        left = MOST_TENSOR_BYTE_SIZE
        for tensor in inputs:
            recorded = _described(tensor)
            found.tensors.append(recorded)
            byte_size = recorded.byte_size
            if recorded.region or not byte_size:
                continue
            if byte_size > left or (byte_size > self._limit and not self._digests):
                recorded.missing = TOO_LARGE
                continue
            left -= byte_size
            recorded.digest = self._digests
            if byte_size <= _INLINE_LIMIT:
                recorded.data = bytes(tensor.raw())
                continue
            try:
                block = self._memory(byte_size)
            except ServingError:
                recorded.missing = NO_MEMORY
                continue
            block.view()[:byte_size] = tensor.raw()
            found.sources.append(Tensor(tensor.name, "UINT8", [byte_size], None, block.span))
            recorded.source = len(found.sources)
        return found


def capture_outputs(outputs: Sequence[Tensor], limit: int, digests: bool) -> Captured:
    """Return the outputs of a response: those of more than `limit` bytes by their digest."""
    found = Captured()
    for tensor in outputs:
        recorded = _described(tensor)
        found.tensors.append(recorded)
        if recorded.region or not recorded.byte_size:
            continue
        recorded.digest = digests or recorded.byte_size > limit
        if tensor.data is not None:
            recorded.data = bytes(tensor.data)
        else:
            assert tensor.span is not None, f"output '{tensor.name}' has no place"
            span = tensor.span.shared()
            found.sources.append(Tensor(tensor.name, "UINT8", [recorded.byte_size], None, span))
            recorded.source = len(found.sources)
    return found


def capture_requested(outputs: Sequence[RequestedOutput]) -> list[RecordedOutput]:
    """Return the requested outputs."""
    found = []
    for output in outputs:
        recorded = RecordedOutput(output.name, output.classification)
        region = output.region_of_client
        if region is not None:
            recorded.region, recorded.offset, recorded.byte_size = region.name, region.offset, region.byte_size
        found.append(recorded)
    return found


def _described(tensor: Tensor) -> RecordedTensor:
    recorded = RecordedTensor(tensor.name, tensor.datatype, list(tensor.shape), tensor.byte_size)
    region = tensor.region_of_client
    if region is not None:
        recorded.region, recorded.offset = region.name, region.offset
    return recorded
