"""Places the inputs of a request where a worker can read them: in the message, in an arena, or in a client's region."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import NoDescriptorLeft, lacks_descriptors
from kernel.memory.receive_buffer import ALIGNMENT, ReceiveBuffer
from kernel.memory.refusals import MemoryRefusals
from kernel.serving.request import REQUEST_BYTE_SIZE
from shm.arena import INLINE_LIMIT, Arena
from shm.budget import ByteBudget

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.memory.client_regions import RegionRegistry
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from shm.arena import Block
    from shm.tensor import Tensor


class InputPlacer:
    """Gives each input its place. Each model has its own arena, so that no worker sees the inputs of another model."""

    def __init__(
        self,
        regions: RegionRegistry,
        arena_byte_size: int,
        budget: ByteBudget | None = None,
        later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`arena_byte_size` is the limit of each model, `budget` that of the server, if it has one.

        `later` is that of `Arena`.
        """
        self._regions = regions
        self._arena_byte_size = arena_byte_size
        self._budget = budget or ByteBudget(1 << 62)
        self._later = later
        self.refusals = MemoryRefusals(arena_byte_size, budget)
        #: Messages for helpers; None before the first.
        self._message_arena: Arena | None = None
        #: How many tensors were copied to an arena, and their bytes.
        self.copies = self.copied_byte_size = 0

    def lease(self, request: Request) -> None:
        """Lease the client regions that `request` names. Raises `ServingError`.

        If this or a later step fails, the caller releases the request's leases.
        """
        regions = self._regions
        peer = request.sink.peer if regions.owned else ""
        for tensor in request.inputs:
            if tensor.client_span is not None:
                tensor.span, tensor.client_span = regions.lease(tensor.client_span, peer), None
                request.leased = True
            elif tensor.span is not None:  # in the memory of another model's output
                request.leased = True
        for output in request.outputs:
            if output.client_span is not None:
                output.span, output.client_span = regions.lease(output.client_span, peer), None
                request.leased = True

    def receive_buffer(self, model: Model, byte_size: int, first_tensor: int) -> ReceiveBuffer | None:
        """Return a buffer in the model's arena to receive a message of `byte_size` bytes; None if there is no space.

        None also if there is no file descriptor for a new arena: the request is refused when all of it has arrived.

        `first_tensor` is the offset of the first tensor in the message. The announced size costs address space of the
        arena, not memory. Buffers take at most half of the arena and of the budget; the rest is left for tensors that
        are copied.
        """
        try:
            arena = self._arena(model)
        except OSError as error:
            if lacks_descriptors(error):
                return None
            raise
        start = -first_tensor % ALIGNMENT
        if arena.allocator.used_bytes + start + byte_size > self._arena_byte_size // 2:
            return None
        budget = self._budget
        if budget is not None and budget.used_byte_size + start + byte_size > budget.limit_byte_size // 2:
            return None
        block = arena.take(start + byte_size)
        return None if block is None else ReceiveBuffer(block, start, byte_size)

    def take(self, model: Model, byte_size: int) -> Block:
        """Return a new block of the model's arena; the caller releases it. Raises `ArenaFull`."""
        block = self._arena(model).take(byte_size)
        if block is None:
            raise self.refusals.no_room(byte_size)
        return block

    @property
    def budget(self) -> ByteBudget:
        """The limit of all arenas; without one a very large one."""
        return self._budget

    def message_buffer(self, byte_size: int) -> ReceiveBuffer:
        """Return a buffer for a message that a helper decodes; its model may be unknown.

        Raises `ArenaFull` and `NoDescriptorLeft`.
        """
        return ReceiveBuffer(self.take_for_helper(byte_size), 0, byte_size, of_model=False)

    def take_for_helper(self, byte_size: int) -> Block:
        """Return a block that only helpers read; the caller releases it. Raises `ArenaFull` and `NoDescriptorLeft`."""
        if self._message_arena is None:
            try:
                self._message_arena = Arena("naiad messages", self._arena_byte_size, self._budget, self._later)
            except OSError as error:
                if lacks_descriptors(error):
                    raise NoDescriptorLeft from error
                raise
        block = self._message_arena.take(byte_size)
        if block is None:
            raise self.refusals.no_room(byte_size, "message")
        return block

    def place_large(self, request: Request, model: Model, received_in: ReceiveBuffer | None) -> None:
        """Put inputs that are too large for a message into the model's arena, and count the others. Raises `ArenaFull`.

        Inputs in `received_in` stay there; others are copied. After this call no input refers to `received_in.view`.
        """
        # If the model was reloaded while the message was received, it has a new arena: then the inputs are copied.
        in_arena = received_in is not None and received_in.region is self._arena(model).region
        usable = received_in if in_arena else None
        request.byte_size = REQUEST_BYTE_SIZE
        for tensor in request.inputs:
            if tensor.data is None:
                continue
            if len(tensor.data) <= INLINE_LIMIT:
                request.byte_size += len(tensor.data)
                if type(tensor.data) is not bytes:  # a part of the message, which is larger and does not count
                    tensor.data = bytes(tensor.data)
            else:
                request.leased = True
                if usable is None or not _use_in_place(tensor, usable):
                    self._copy_to_arena(tensor, model)

    def _arena(self, model: Model) -> Arena:
        if model.input_arena is None:
            name = f"naiad inputs of {model.name}"
            model.input_arena = Arena(name, self._arena_byte_size, self._budget, self._later)
        return model.input_arena

    def _copy_to_arena(self, tensor: Tensor, model: Model) -> None:
        assert tensor.data is not None
        byte_size = len(tensor.data)
        block = self.take(model, byte_size)
        block.view()[:] = tensor.data
        tensor.span = block.span
        tensor.data = None  # so that the received message can be freed
        self.copies += 1
        self.copied_byte_size += byte_size


def _use_in_place(tensor: Tensor, buffer: ReceiveBuffer) -> bool:
    assert tensor.data is not None
    tensor.span = buffer.span(tensor.data)
    if tensor.span is None:
        return False
    tensor.data = None
    return True
