"""A request body that aiohttp receives in parts: small ones in ordinary memory, others in memory of their model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.body_sizes import RECEIVE_BUFFER_BYTE_SIZE
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm.arena import Block

#: A body of unknown length gets blocks that are as large as all before together, within these bounds.
_LEAST_BLOCK, _MOST_BLOCK = 256 << 10, 16 << 20


class BodyCollector:
    """Collects the parts of one body. The owner calls `release`, or takes `sources` and their leases."""

    def __init__(self, take: Callable[[int], Block], announced: int | None) -> None:
        """`take` returns a block of that many bytes, or raises `ArenaFull`. `announced` is the length, if known."""
        self._take = take
        self._announced = announced
        self._small: list[bytes] = []
        self._blocks: list[Block] = []
        #: How many bytes of the last block are filled.
        self._filled = 0
        self.byte_size = 0

    @property
    def is_small(self) -> bool:
        """Whether the body is in ordinary memory."""
        return not self._blocks

    def add(self, part: bytes) -> None:
        """Take the next bytes. Raises `ArenaFull`."""
        self.byte_size += len(part)
        if self._blocks or self.byte_size > RECEIVE_BUFFER_BYTE_SIZE:
            earlier, self._small = self._small, []
            for each in (*earlier, part):
                self._store(each)
        else:
            self._small.append(part)

    def _store(self, part: bytes) -> None:
        rest = memoryview(part)
        while len(rest):
            room = self._blocks[-1].byte_size - self._filled if self._blocks else 0
            if not room:
                room, self._filled = self._add_block(len(rest)), 0
            count = min(room, len(rest))
            self._blocks[-1].view()[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]

    def _add_block(self, least: int) -> int:
        """Take one more block with room for `least` bytes or more; returns its size."""
        stored = sum(block.byte_size for block in self._blocks)
        if self._announced is not None and self._announced - stored >= least:
            byte_size = self._announced - stored
        else:
            byte_size = max(least, min(max(stored, _LEAST_BLOCK), _MOST_BLOCK))
        self._blocks.append(self._take(byte_size))
        return byte_size

    def body(self) -> bytes:
        """Return a small body."""
        assert self.is_small, "a large body is in blocks"
        return b"".join(self._small)

    def sources(self) -> list[Tensor]:
        """Return the body as sources of a task, whose leases are the caller's from now on."""
        if self.is_small:
            return [Tensor("", "UINT8", [self.byte_size], self.body())]
        blocks, self._blocks = self._blocks, []
        sources = []
        for block in blocks:
            span = block.span
            if block is blocks[-1]:
                span = type(span)(span.lease, span.offset, self._filled)
            sources.append(Tensor("", "UINT8", [span.byte_size], None, span))
        return sources

    def release(self) -> None:
        """Release the memory of what was collected. A second call, or one after `sources`, does nothing."""
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            block.release()
