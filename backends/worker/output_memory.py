"""The worker's memory for large outputs: an arena that other processes read, or copies that are sent.

`backends/worker/outputs.py` writes to it.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Protocol

from backends.transport import wire
from kernel.errors import ArenaFull
from shm.arena import Arena
from shm.lease import RegionNumber
from shm.tensor import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shm.arena import Block
    from shm.tensor import Tensor

_OWN_ARENA = RegionNumber(wire.OUTPUT_ARENA)


class OutputMemory(Protocol):
    """Allocates memory for large outputs. Callable from any thread."""

    #: The most bytes that outputs may take at a time.
    byte_size: int

    def take(self, byte_size: int) -> tuple[Span, memoryview]:
        """Return the span for a new output and its bytes, writable. Raises `ArenaFull`."""

    def owns(self, span: Span) -> bool:
        """Whether `take` returned the span."""

    def free(self, offsets: Sequence[int]) -> None:
        """Free blocks of the arena, by their offsets."""

    def drop(self, span: Span) -> None:
        """Free a span that no response names."""

    def close(self) -> None:
        """The worker ends, and its process may continue. The kernel keeps the memory of responses that it has."""

    def publish(self, tensors: Sequence[Tensor]) -> None:
        """Make these tensors readable for the kernel, before the response that has them is sent."""


class ArenaOutputs:
    """`OutputMemory` in an arena of this worker. Only the worker allocates in it; other processes read.

    The kernel sends which blocks to free.
    """

    def __init__(self, on_arena: Callable[[Arena], None]) -> None:
        """`on_arena` is called with the arena when it is created, for the first large output."""
        self.byte_size = 1 << 34
        #: None before the first large output.
        self.arena: Arena | None = None
        self._on_arena = on_arena
        self._steady_byte_size = 0
        self._blocks: dict[int, Block] = {}
        self._lock = threading.Lock()

    def take(self, byte_size: int) -> tuple[Span, memoryview]:
        with self._lock:
            if self.arena is None:
                self.arena = Arena(f"naiad outputs {os.getpid()}", self.byte_size)
                self.arena.region.steady_byte_size = min(self._steady_byte_size, self.byte_size)
                self._on_arena(self.arena)
            block = self.arena.take(byte_size)
            if block is None:
                raise ArenaFull(byte_size)
            self._blocks[block.offset] = block
        return Span(_OWN_ARENA, block.offset, byte_size), block.view()

    def keep_pages(self, byte_size: int) -> None:
        """Keep the pages of the first `byte_size` bytes of the arena from now on: they are about to be pinned."""
        with self._lock:  # no page is being given back meanwhile
            self._steady_byte_size = byte_size
            if self.arena is not None:
                self.arena.region.steady_byte_size = min(byte_size, self.byte_size)

    def owns(self, span: Span) -> bool:
        return span.lease is _OWN_ARENA

    def free(self, offsets: Sequence[int]) -> None:
        with self._lock:
            for offset in offsets:
                self._blocks.pop(offset).release()

    def drop(self, span: Span) -> None:
        self.free([span.offset])

    def close(self) -> None:
        """See `OutputMemory`. Blocks that the kernel still has stay as they are."""
        with self._lock:
            if self.arena is not None:
                self.arena.close()  # first: no page is given back from now on
            for block in self._blocks.values():
                block.release()
            self._blocks.clear()

    def publish(self, tensors: Sequence[Tensor]) -> None:
        """See `OutputMemory`: the arena is shared."""


class SentOutputs:
    """`OutputMemory` of a worker that shares no memory with the kernel: outputs are sent and freed.

    Small ones are sent with their response, the others in chunks before it.
    """

    def __init__(self, send: Callable[[wire.ToKernel], None]) -> None:
        self.byte_size = 1 << 34
        self._send = send
        self._numbers = itertools.count(wire.FIRST_TRANSFER_OF_WORKER)
        #: Outputs that are not sent yet, by the region number that each has on the wire.
        self._unsent: dict[int, bytearray] = {}

    def take(self, byte_size: int) -> tuple[Span, memoryview]:
        if byte_size > self.byte_size:
            raise ArenaFull(byte_size)
        number = next(self._numbers)
        memory = self._unsent[number] = bytearray(byte_size)
        return Span(RegionNumber(number), 0, byte_size), memoryview(memory)

    def owns(self, span: Span) -> bool:
        return span.lease.region_number >= wire.FIRST_TRANSFER_OF_WORKER

    def free(self, offsets: Sequence[int]) -> None:
        """See `OutputMemory`: the kernel has copies and never frees ours."""
        raise AssertionError("blocks were freed in a session without shared memory")

    def drop(self, span: Span) -> None:
        self._unsent.pop(span.lease.region_number, None)

    def close(self) -> None:
        self._unsent.clear()

    def publish(self, tensors: Sequence[Tensor]) -> None:
        room = wire.SENT_INLINE_BYTE_SIZE
        for tensor in tensors:
            if tensor.span is not None and self.owns(tensor.span):
                number = tensor.span.lease.region_number
                memory = memoryview(self._unsent.pop(number))
                if len(memory) <= room:
                    room -= len(memory)
                    tensor.data, tensor.span = memory, None
                    continue
                self._send(wire.Transfer(number, len(memory)))
                for start in range(0, len(memory), wire.CHUNK_BYTE_SIZE):
                    self._send(wire.Chunk(number, start, memory[start : start + wire.CHUNK_BYTE_SIZE]))
