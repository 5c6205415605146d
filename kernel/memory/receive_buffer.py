"""Bodies of requests in the arenas of their models: a front door receives into the memory that a worker reads.

The tensors in a body share its block, which is free again when the last of them has been used.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from shm.region import Span

if TYPE_CHECKING:
    from kernel.serving.request import Buffer
    from shm.arena import Block
    from shm.region import Region

#: Tensors begin at multiples of this where they can: what vector units and frameworks like best.
ALIGNMENT = 64


class ReceiveBuffer:
    """A body in a block of an arena. Whoever made it releases it once, whatever became of its tensors."""

    __slots__ = ("_block", "_start", "_users", "view")

    def __init__(self, block: Block, start: int, byte_size: int) -> None:
        """The body is the `byte_size` bytes from `start` of `block`, which is the body's from now on."""
        self._block = block
        self._start = start
        self._users = 1
        #: Where the body belongs, writable; not to be used after `release`.
        self.view = block.view()[start : start + byte_size]

    @property
    def region(self) -> Region:
        return self._block.region

    def span(self, data: Buffer, alignment: int) -> Span | None:
        """Return where `data` lies; the span's lease is the caller's.

        None where it is no part of `view`, or begins at no multiple of `alignment` bytes, so that a worker
        could not use it in place.
        """
        if type(data) is not memoryview or data.readonly:
            return None
        position = _address(data) - _address(self.view)
        start = self._block.offset + self._start + position
        if not 0 <= position <= len(self.view) - len(data) or start % alignment:
            return None
        self._users += 1
        return Span(_Part(self), start, len(data))

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            self._block.release()


class _Part:
    """One tensor's use of a body. `release` ends it; a second call does nothing."""

    __slots__ = ("_body", "region")

    def __init__(self, body: ReceiveBuffer) -> None:
        self._body: ReceiveBuffer | None = body
        self.region = body.region

    def release(self) -> None:
        if self._body is not None:
            body, self._body = self._body, None
            body.release()


def _address(data: memoryview) -> int:
    # A slice of a memoryview does not tell where it begins.
    return ctypes.addressof(ctypes.c_char.from_buffer(data))  # a writable view
