"""Which bytes of shared memory are in use: of one arena, and of the whole server. Pure: it accesses no memory.

`BlockAllocator` is a buddy allocator over the offsets of an arena. The size of a block is a power of two. The part of a
block that its tensor does not need costs address space, not memory: an arena is a sparse file, and a page does not
exist until it is written.

`ByteBudget` counts for all arenas of a server. A block counts from when it is taken until its last lease is released,
no matter who holds that lease. Tensors of requests are admitted only within the limit. Outputs of workers are counted
but never refused, because the work for them is already done.

`ReturnedPages` gives pages of freed blocks back to the system, a little at a time: to give back 16 MiB takes 2 to 5 ms,
which is too long for one piece of work on the event loop. Callers pass the function that does it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: The smallest block, in bytes: one page. Smaller tensors travel inside messages.
MIN_BLOCK = 4096

#: How many bytes of freed blocks stay cached with their pages. Cached blocks are taken first: page faults for
#: 16 MiB of new pages take several milliseconds.
CACHED_BYTES = 128 << 20


class BlockAllocator:
    """Allocates blocks in `[0, capacity)`. `capacity`, in bytes, is a power of two."""

    def __init__(self, capacity: int, cached_bytes: int = CACHED_BYTES) -> None:
        assert capacity >= MIN_BLOCK, capacity
        assert capacity & (capacity - 1) == 0, f"capacity {capacity} is not a power of two"
        self.capacity = capacity
        self._cache_limit = cached_bytes
        self._cached_total = 0
        # Free blocks by size. Dictionaries serve as ordered sets: a buddy is removed by its offset.
        self._free: dict[int, dict[int, None]] = {capacity: {0: None}}
        self._cached: dict[int, list[int]] = {}
        self._used: dict[int, int] = {}
        #: Freed blocks whose pages the caller of `free` gives back.
        self._returning: dict[int, int] = {}
        #: By offset of a block in use or cached: the most bytes that a user has asked for. Only these may have pages.
        self._touched: dict[int, int] = {}
        self.used_bytes = 0

    @property
    def block_count(self) -> int:
        return len(self._used)

    def take(self, byte_size: int) -> int | None:
        """Return the offset of a new block of at least `byte_size` bytes, or None if there is no space."""
        size = max(MIN_BLOCK, 1 << (byte_size - 1).bit_length())
        cached = self._cached.get(size)
        if cached:
            offset = cached.pop()
            self._cached_total -= self._touched[offset]
        else:
            found = self._split(size)
            if found is None and self._cached_total:
                self._join_all_cached()
                found = self._split(size)
            if found is None:
                return None
            offset = found
        self._used[offset] = size
        self._touched[offset] = max(byte_size, self._touched.get(offset, 0))
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> tuple[int, int] | None:
        """Free the block at `offset`. Returns (offset, size) if the caller is to return its pages to the system.

        Then it is not taken again before the caller has called `returned`.
        Raises KeyError if no block in use starts there, which is a bug of the caller.
        """
        size = self._used.pop(offset)
        self.used_bytes -= size
        touched = self._touched[offset]
        if self._cached_total + touched <= self._cache_limit:
            self._cached.setdefault(size, []).append(offset)
            self._cached_total += touched
            return None
        del self._touched[offset]
        self._returning[offset] = size
        return offset, size

    def returned(self, offset: int) -> None:
        """The pages of the block at `offset` were given back: the block can be taken again."""
        self._join(offset, self._returning.pop(offset))

    def size_of(self, offset: int) -> int:
        """Return the size of the block in use at `offset`."""
        return self._used[offset]

    def _split(self, size: int) -> int | None:
        """Take a free block of `size` bytes; split a larger one if there is none."""
        larger = size
        while larger <= self.capacity and not self._free.get(larger):
            larger *= 2
        if larger > self.capacity:
            return None
        offset, _ = self._free[larger].popitem()
        while larger > size:
            larger //= 2
            self._free.setdefault(larger, {})[offset + larger] = None
        return offset

    def _join(self, offset: int, size: int) -> None:
        """Add a free block, joined with its free buddies."""
        while size < self.capacity:
            siblings = self._free.get(size, {})
            buddy = offset ^ size
            if buddy not in siblings:
                break
            del siblings[buddy]
            offset = min(offset, buddy)
            size *= 2
        self._free.setdefault(size, {})[offset] = None

    def _join_all_cached(self) -> None:
        for size, offsets in self._cached.items():
            for offset in offsets:
                del self._touched[offset]
                self._join(offset, size)
        self._cached.clear()
        self._cached_total = 0

    def check(self) -> None:
        """Recompute the invariants: the blocks fill the capacity without gap or overlap."""
        blocks = [*self._used.items(), *self._returning.items()]
        blocks += [(offset, size) for size, offsets in self._cached.items() for offset in offsets]
        blocks += [(offset, size) for size, offsets in self._free.items() for offset in offsets]
        position = 0
        for offset, size in sorted(blocks):
            assert offset == position, f"gap or overlap at {position}: next block is at {offset}"
            assert offset % size == 0, f"block of {size} bytes at {offset} is not aligned"
            position += size
        assert position == self.capacity
        assert self.used_bytes == sum(self._used.values())
        assert self._cached_total == sum(self._touched[o] for offsets in self._cached.values() for o in offsets)
        assert len(self._touched) == len(self._used) + sum(map(len, self._cached.values()))
        assert self._cached_total <= self._cache_limit


class ByteBudget:
    """How many bytes are in use, and how many may be."""

    __slots__ = ("limit_byte_size", "used_byte_size")

    def __init__(self, limit_byte_size: int) -> None:
        assert limit_byte_size > 0, limit_byte_size
        self.limit_byte_size = limit_byte_size
        #: May exceed the limit, by outputs of workers.
        self.used_byte_size = 0

    def has_room(self, byte_size: int) -> bool:
        """Whether `byte_size` more bytes are within the limit."""
        return self.used_byte_size + byte_size <= self.limit_byte_size

    def add(self, byte_size: int) -> None:
        """`byte_size` more bytes are in use, within the limit or not."""
        self.used_byte_size += byte_size

    def remove(self, byte_size: int) -> None:
        """`byte_size` bytes are no longer in use."""
        self.used_byte_size -= byte_size
        assert self.used_byte_size >= 0, "more bytes were given back than taken"


#: Bytes that are given back in one step: about 0.5 ms.
SLICE_BYTE_SIZE = 2 << 20


class ReturnedPages:
    """The blocks of one arena whose pages are still to be given back."""

    def __init__(self, remove: Callable[[int, int], None], returned: Callable[[int], None]) -> None:
        """`remove` gives back bytes from an offset on; `returned` gets the offset of a block without pages."""
        self._remove = remove
        self._returned = returned
        #: Offset and byte size of each block, and how much of the first is done.
        self._blocks: deque[tuple[int, int]] = deque()
        self._done = 0

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, offset: int, byte_size: int) -> None:
        """Let the pages of a block of `byte_size` bytes wait."""
        self._blocks.append((offset, byte_size))

    def step(self) -> None:
        """Give back a slice of the oldest block."""
        offset, byte_size = self._blocks[0]
        size = min(SLICE_BYTE_SIZE, byte_size - self._done)
        self._remove(offset + self._done, size)
        self._done += size
        if self._done == byte_size:
            self._blocks.popleft()
            self._done = 0
            self._returned(offset)

    def finish(self) -> None:
        """Give back everything now."""
        while self._blocks:
            self.step()
