"""Buffers in the arenas of models: a front door receives a message into the memory that a worker reads.

The tensors in a message share its block, which is free again when the last of them was released.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from shm.tensor import Span

if TYPE_CHECKING:
    from shm.arena import Block
    from shm.region import Region
    from shm.tensor import Buffer

#: Tensors begin at multiples of this where they can: what vector units and frameworks like best.
ALIGNMENT = 64


class ReceiveBuffer:
    """A message in a block of an arena. The front door that asked for it releases it once."""

    __slots__ = ("_block", "_start", "view")

    def __init__(self, block: Block, start: int, byte_size: int) -> None:
        """The message is `byte_size` bytes from `start` of `block`, whose lease is the buffer's from now on."""
        self._block = block
        self._start = start
        #: Where the message belongs, writable; not to be used after `release`.
        self.view = block.view()[start : start + byte_size]

    @property
    def region(self) -> Region:
        return self._block.lease.region

    def span(self, data: Buffer, alignment: int) -> Span | None:
        """Return where `data` lies, with a lease that is the caller's.

        None where `data` is no part of `view`, or does not begin at a multiple of `alignment` bytes, so that a worker
        could not use it in place.
        """
        if type(data) is not memoryview or data.readonly:
            return None
        position = _address(data) - _address(self.view)
        start = self._block.offset + self._start + position
        if not 0 <= position <= len(self.view) - len(data) or start % alignment:
            return None
        return Span(self._block.lease.share(), start, len(data))

    def release(self) -> None:
        """End the front door's use. Tensors in the buffer keep the block until they are released."""
        self._block.release()


def _address(data: memoryview) -> int:
    # A slice of a memoryview does not tell where it begins.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))  # a writable view
