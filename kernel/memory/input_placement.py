"""Places the inputs of a request where a worker can read them: in the message, in an arena, or in a client's region.

A front door may receive a message in a buffer in the arena of its model, so that nothing is copied: the tensors of the
message share its block, which is freed when the last of them is released. A request for which there is no memory is
refused; the refusals are counted and logged.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING

from kernel.errors import ArenaFull, MemoryFull, NoDescriptorLeft, lacks_descriptors
from kernel.observe.limited_log import LimitedLog
from kernel.serving.request import REQUEST_BYTE_SIZE
from shm.arena import INLINE_LIMIT, Arena
from shm.blocks import ByteBudget
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.memory.client_regions import RegionRegistry
    from kernel.serving.model import Model
    from kernel.serving.request import Request
    from shm.arena import Block
    from shm.region import Region
    from shm.tensor import Buffer, Tensor


class MemoryRefusals:
    """Makes the errors of one server."""

    def __init__(self, arena_byte_size: int, budget: ByteBudget | None) -> None:
        """`arena_byte_size` is the limit of each model, `budget` the server's, if it has one."""
        self._arena_byte_size = arena_byte_size
        self._budget = budget
        self._log = LimitedLog(logging.getLogger(__name__), logging.WARNING)
        #: How many errors were made.
        self.count = 0

    def no_room(self, byte_size: int, what: str = "tensor") -> ArenaFull:
        """Return the error of a request with a `what` of `byte_size` bytes, for which no block was found."""
        exceeded = ""
        if self._budget is not None and byte_size > self._budget.limit_byte_size:
            exceeded = f"--memory-byte-size={self._budget.limit_byte_size}"
        elif byte_size > self._arena_byte_size:
            exceeded = f"--arena-byte-size={self._arena_byte_size}"
        error = ArenaFull(byte_size, what, exceeded)
        self._report(error)
        return error

    def full(self) -> MemoryFull:
        """Return the error of a request that comes while all memory is in use."""
        error = MemoryFull()
        self._report(error)
        return error

    def _report(self, error: ArenaFull | MemoryFull) -> None:
        self.count += 1
        use, budget = "", self._budget
        if budget is not None:
            bytes_used = f"{budget.used_byte_size} of {budget.limit_byte_size} bytes"
            use = f"; all requests together use {bytes_used} (--memory-byte-size)"
        self._log.log("requests without memory", "a request is refused: %s%s", error.message, use)


#: Alignment of the first tensor in bytes: what vector units and frameworks prefer.
ALIGNMENT = 64


class ReceiveBuffer:
    """A block of an arena with room for one message. The front door that requested it releases it once."""

    __slots__ = ("_block", "_start", "of_model", "view")

    def __init__(self, block: Block, start: int, byte_size: int, *, of_model: bool = True) -> None:
        """The message has `byte_size` bytes from `start` of `block`. The buffer owns the block's lease from now on."""
        self._block = block
        #: Whether the block is in the arena of the message's model. If not, only a helper reads it.
        self.of_model = of_model
        self._start = start
        #: The memory for the message, writable. Do not use it after `release`.
        self.view = block.view()[start : start + byte_size]

    @property
    def region(self) -> Region:
        return self._block.lease.region

    def span(self, data: Buffer) -> Span | None:
        """Return the span of `data` with a lease that the caller owns; None if `data` is not a part of `view`.

        Tensors in it may begin anywhere: workers copy those that are not aligned (`backends/worker/inputs.py`).
        """
        if type(data) is not memoryview or data.readonly:
            return None
        position = _address(data) - _address(self.view)
        start = self._block.offset + self._start + position
        if not 0 <= position <= len(self.view) - len(data):
            return None
        return Span(self._block.lease.share(), start, len(data))

    def release(self) -> None:
        """Release the front door's lease. Tensors in the buffer have leases of their own."""
        self._block.release()


def _address(data: memoryview) -> int:
    # A slice of a memoryview does not know its offset in the whole.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))  # a writable view


class InputPlacer:
    """Gives each input its place. Each model has its own arena, so that no worker sees the inputs of another model."""

    def __init__(
        self,
        regions: RegionRegistry,
        arena_byte_size: int,
        budget: ByteBudget | None = None,
        later: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`arena_byte_size` is the limit of each model, `budget` the server's, if it has one.

        `later` is as for `Arena`.
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
