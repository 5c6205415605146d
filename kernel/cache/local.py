"""The response cache in the memory of the server: the least recently used entries go first.

An entry owns copies of its outputs. Large outputs lie in one block of the cache's own arena, so that a hit is not
copied: its outputs are spans of that block with leases of their own, and stay readable when the entry is removed.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from kernel.cache.interface import CachedResponse
from kernel.serving.interface import CacheFigures
from shm.arena import INLINE_LIMIT, Arena
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from kernel.cache.interface import ExpectedOutputs
    from kernel.serving.response import ParameterValue
    from shm.arena import Block
    from shm.blocks import ByteBudget

#: What an entry counts beside the bytes of its outputs: its objects, its key, its place in the table.
ENTRY_BYTE_SIZE = 1024
_OUTPUT_BYTE_SIZE = 256

#: Bytes that are copied at once. A MiB takes about 0.3 ms with the page faults of new memory.
SLICE_BYTE_SIZE = 1 << 20

_ALIGNMENT = 64


class _Entry(msgspec.Struct, eq=False):
    """A stored response. Its outputs are inline, or have spans of `block`."""

    outputs: list[Tensor]
    parameters: dict[str, ParameterValue] | None
    #: What it counts in the size of the cache.
    byte_size: int
    block: Block | None

    def response(self) -> CachedResponse:
        """Return the response, with leases of its own."""
        outputs = [
            Tensor(each.name, each.datatype, list(each.shape), each.data, each.span and each.span.shared())
            for each in self.outputs
        ]
        parameters = None if self.parameters is None else dict(self.parameters)
        return CachedResponse(outputs, parameters, self.block is not None)


class _Copying(msgspec.Struct, eq=False):
    """An entry that is being filled."""

    entry: _Entry
    #: The copying that is left to do.
    steps: Generator[None, None, None]


class LocalCache:
    """Implements `ResponseCache`. Entries together take at most `byte_size` bytes, and count in the server's budget."""

    shared = False

    def __init__(
        self,
        byte_size: int,
        budget: ByteBudget | None = None,
        *,
        later: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        """`later` calls a function in the next event-loop iteration. Large outputs are copied in several of them."""
        self.figures = CacheFigures(byte_size=byte_size)
        self._byte_size = byte_size
        self._budget = budget
        self._later = later or (lambda step: asyncio.get_running_loop().call_soon(step))
        #: The entry that was used last is the last one.
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # a dict takes long to find its first of many
        #: Entries whose outputs are being copied. They count, and cannot be found or removed yet.
        self._copying: dict[bytes, _Copying] = {}
        #: Made for the first output that is not inline.
        self._arena: Arena | None = None

    def lookup(self, key: bytes, found: Callable[[CachedResponse | None], None], expected: ExpectedOutputs) -> None:
        """Look `key` up. `found` is called before this returns."""
        begun_ns = time.perf_counter_ns()
        figures = self.figures
        figures.lookups += 1
        entry = self._entries.get(key)
        response = None
        if entry is not None:
            self._entries.move_to_end(key)
            figures.hits += 1
            response = entry.response()
        figures.lookup_ns += time.perf_counter_ns() - begun_ns
        found(response)

    def insert(
        self,
        key: bytes,
        outputs: Sequence[Tensor],
        parameters: dict[str, ParameterValue] | None,
        expected: ExpectedOutputs,
    ) -> bool:
        """Store copies of `outputs`. Up to `SLICE_BYTE_SIZE` bytes are copied before this returns."""
        if key in self._entries or key in self._copying:
            return False
        begun_ns = time.perf_counter_ns()
        entry = self._make_entry(outputs, parameters)
        if entry is None:
            self.figures.not_stored += 1
        elif entry.block is None:
            self._entries[key] = entry
        else:
            self._copy(key, entry, outputs)
        self._note_size()
        self.figures.insertion_ns += time.perf_counter_ns() - begun_ns
        return True

    def _make_entry(self, outputs: Sequence[Tensor], parameters: dict[str, ParameterValue] | None) -> _Entry | None:
        """Return an entry, which is counted, with memory for its outputs; None if there is none for it."""
        inline = ENTRY_BYTE_SIZE + sum(_OUTPUT_BYTE_SIZE + 8 * len(each.shape) for each in outputs)
        inline += sum(len(name) + len(str(value)) for name, value in (parameters or {}).items())
        in_block = 0
        for output in outputs:
            if output.byte_size <= INLINE_LIMIT:
                inline += output.byte_size
            else:
                in_block += _aligned(output.byte_size)
        if inline + in_block > self._byte_size or (self._budget is not None and not self._budget.has_room(inline)):
            return None
        while self._entries and self.figures.used_byte_size + inline + in_block > self._byte_size:
            self._evict()
        if self.figures.used_byte_size + inline + in_block > self._byte_size:
            return None  # the rest is being copied
        block = self._take(in_block) if in_block else None
        if in_block and block is None:
            return None
        if self._budget is not None:
            self._budget.add(inline)
        self.figures.used_byte_size += inline + in_block
        copies = list(_placed(outputs, block))
        return _Entry(copies, None if parameters is None else dict(parameters), inline + in_block, block)

    def _take(self, byte_size: int) -> Block | None:
        """Return a new block, or None if the server's budget has no room for it."""
        if self._arena is None:
            # Twice the size: an arena is a sparse file, and the sizes of blocks in it are powers of two.
            capacity = 1 << (2 * self._byte_size - 1).bit_length()
            self._arena = Arena("naiad cache", capacity, self._budget)
        while (block := self._arena.take(byte_size)) is None:
            if not self._entries or (self._budget is not None and not self._budget.has_room(byte_size)):
                return None
            self._evict()  # the free space is in pieces
        return block

    def _copy(self, key: bytes, entry: _Entry, outputs: Sequence[Tensor]) -> None:
        """Copy large outputs into the block of the entry, now or in several event-loop iterations."""
        copying = self._copying[key] = _Copying(entry, _copy_steps(entry, outputs))

        def step() -> None:
            if self._copying.get(key) is not copying:  # the cache was closed
                return
            begun_ns = time.perf_counter_ns()
            if next(copying.steps, self) is self:
                del self._copying[key]
                self._entries[key] = entry
                self._note_size()
            else:
                self._later(step)
            self.figures.insertion_ns += time.perf_counter_ns() - begun_ns

        step()

    def _evict(self) -> None:
        """Remove the entry that was not used for the longest time."""
        self._forget(self._entries.popitem(last=False)[1])
        self.figures.evictions += 1

    def _forget(self, entry: _Entry) -> None:
        self.figures.used_byte_size -= entry.byte_size
        in_block = 0
        if entry.block is not None:
            in_block = entry.block.byte_size
            for output in entry.outputs:
                output.release()
            entry.block.release()
        if self._budget is not None:
            self._budget.remove(entry.byte_size - in_block)

    def _note_size(self) -> None:
        self.figures.entries = len(self._entries)

    async def close(self) -> None:
        copying, self._copying = self._copying, {}
        for each in copying.values():
            each.steps.close()
            self._forget(each.entry)
        while self._entries:
            self._forget(self._entries.popitem()[1])
        self._note_size()
        if self._arena is not None:
            self._arena.close()


def _placed(outputs: Sequence[Tensor], block: Block | None) -> Iterator[Tensor]:
    """Yield copies of `outputs`: small ones inline, large ones with spans of `block` that are not filled yet."""
    position = 0
    for output in outputs:
        copy = Tensor(output.name, output.datatype, list(output.shape))
        if output.byte_size <= INLINE_LIMIT:
            copy.data = bytes(output.raw())
        else:
            assert block is not None
            copy.span = Span(block.lease.share(), block.offset + position, output.byte_size)
            position += _aligned(output.byte_size)
        yield copy


def _copy_steps(entry: _Entry, outputs: Sequence[Tensor]) -> Generator[None, None, None]:
    """Copy large outputs to the places in `entry`, with a pause after each slice. Holds leases until it has ended."""
    sources = [Tensor(each.name, each.datatype, each.shape, each.data, each.span and each.span.shared())
               for each in outputs]  # fmt: skip
    copied = 0
    try:
        for source, place in zip(sources, entry.outputs, strict=True):
            if place.span is None:
                continue
            data, target = source.raw(), place.raw()
            assert isinstance(target, memoryview)
            for begin in range(0, len(data), SLICE_BYTE_SIZE):
                if copied >= SLICE_BYTE_SIZE:
                    copied = 0
                    yield
                end = min(begin + SLICE_BYTE_SIZE, len(data))
                target[begin:end] = data[begin:end]
                copied += end - begin
    finally:
        for source in sources:
            source.release()


def _aligned(byte_size: int) -> int:
    return -(-byte_size // _ALIGNMENT) * _ALIGNMENT
