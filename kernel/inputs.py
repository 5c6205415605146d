"""Where a request's input bytes lie when a worker reads them: in the message, an arena or a client's region."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import ArenaFull
from shm.arena import INLINE_LIMIT, Arena
from shm.region import Span

if TYPE_CHECKING:
    from kernel.model import Model
    from kernel.regions import RegionRegistry
    from kernel.request import InputTensor, Request


class InputPlacer:
    """Gives every input its place. One arena per model, so that no model's worker sees another's inputs."""

    def __init__(self, regions: RegionRegistry, arena_byte_size: int) -> None:
        self._regions = regions
        self._arena_byte_size = arena_byte_size

    def lease(self, request: Request) -> None:
        """Lease the client regions that `request` names. Raises `ServingError`.

        Whoever calls releases the request's leases where that, or anything after it, fails.
        """
        for tensor in request.inputs:
            if tensor.shared_memory is not None:
                tensor.span = self._regions.lease(tensor.shared_memory)
        for output in request.outputs:
            if output.shared_memory is not None:
                output.span = self._regions.lease(output.shared_memory)

    def copy_large(self, request: Request, model: Model) -> None:
        """Copy inputs that are too large for a message to the model's arena. Raises `ArenaFull`."""
        for tensor in request.inputs:
            if tensor.data is not None and len(tensor.data) > INLINE_LIMIT:
                self._copy_to_arena(tensor, model)

    def _copy_to_arena(self, tensor: InputTensor, model: Model) -> None:
        assert tensor.data is not None
        if model.input_arena is None:
            model.input_arena = Arena(f"naiad inputs of {model.name}"[:200], self._arena_byte_size)
        byte_size = len(tensor.data)
        block = model.input_arena.take(byte_size)
        if block is None:
            raise ArenaFull(byte_size)
        block.view()[:] = tensor.data
        tensor.span = Span(block, block.offset, byte_size)
        tensor.data = None  # the received body can be freed
