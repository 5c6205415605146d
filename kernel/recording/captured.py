"""Captures the tensors of requests and responses that are not all in messages.

Inputs are copied, because models may change theirs. Outputs do not change: large ones stay where they are under leases
of their own, and the writer reads them there. The kernel never reads regions of clients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import ServingError
from kernel.recording.passed import TOO_LARGE, PassedOutput, PassedTensor
from kernel.recording.settings import MOST_TENSOR_BYTE_SIZE
from shm.arena import INLINE_LIMIT
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shm.arena import Block
    from shm.tensor import RequestedOutput

NO_MEMORY = "no memory was left for the recorder"

#: Tensors of a message, and its sources, with leases of their own.
Captured = tuple[list[PassedTensor], list[Tensor]]


class InputCapture:
    """Copies inputs."""

    def __init__(self, limit: int, digests: bool, memory: Callable[[int], Block]) -> None:
        """Inputs of more than `limit` bytes are left out. `memory` returns a block that the writer can read."""
        self._limit = limit
        self._digests = digests
        self._memory = memory

    def capture(self, inputs: Sequence[Tensor]) -> Captured:
        """Return copies of the inputs of a request. Of one request at most `MOST_TENSOR_BYTE_SIZE` are copied.

        Those that are too large for a message are copied into memory that the writer shares.
        """
        tensors: list[PassedTensor] = []
        sources: list[Tensor] = []
        left = MOST_TENSOR_BYTE_SIZE
        for tensor in inputs:
            passed = _described(tensor)
            tensors.append(passed)
            byte_size = passed.byte_size
            if passed.region is not None or not byte_size:
                continue
            if byte_size > left or (byte_size > self._limit and not self._digests):
                passed.missing = TOO_LARGE
                continue
            left -= byte_size
            if byte_size <= INLINE_LIMIT:
                passed.data = bytes(tensor.raw())
                continue
            try:
                block = self._memory(byte_size)
            except ServingError:
                passed.missing = NO_MEMORY
                continue
            block.view()[:byte_size] = tensor.raw()
            passed.source = len(sources)
            sources.append(Tensor(tensor.name, "UINT8", [byte_size], None, block.span))
        return tensors, sources


def capture_outputs(outputs: Sequence[Tensor]) -> Captured:
    """Return the outputs of a response."""
    tensors: list[PassedTensor] = []
    sources: list[Tensor] = []
    for tensor in outputs:
        passed = _described(tensor)
        tensors.append(passed)
        if tensor.data is not None:
            passed.data = bytes(tensor.data)
        elif passed.region is None and passed.byte_size:
            assert tensor.span is not None, f"output '{tensor.name}' has no place"
            passed.source = len(sources)
            sources.append(Tensor(tensor.name, "UINT8", [passed.byte_size], None, tensor.span.shared()))
    return tensors, sources


def capture_requested(outputs: Sequence[RequestedOutput]) -> list[PassedOutput]:
    """Return the requested outputs."""
    return [PassedOutput(output.name, output.classification, None, output.region_of_client) for output in outputs]


def _described(tensor: Tensor) -> PassedTensor:
    return PassedTensor(
        tensor.name, tensor.datatype, tensor.shape, None, None, tensor.region_of_client, tensor.byte_size
    )
