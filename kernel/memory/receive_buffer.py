"""Buffers in the arenas of models: a front door receives a message into memory that a worker reads.

The tensors of a message share its block. The block is freed when the last of them is released.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from shm.tensor import Span

if TYPE_CHECKING:
    from shm.arena import Block
    from shm.region import Region
    from shm.tensor import Buffer

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
