"""Which bytes of an arena are in use: a buddy allocator over offsets. Pure, no memory is touched.

Blocks are powers of two. What a block is larger than its tensor costs address space, not memory: an
arena is a sparse file, and pages that nobody writes do not exist.
"""

from __future__ import annotations

#: The smallest block, a page: smaller tensors travel inside messages.
MIN_BLOCK = 4096

#: Bytes of recently freed blocks whose pages are kept. They are taken first, since their pages exist
#: already: faulting in 16 MiB of new pages costs several milliseconds.
KEPT_BYTES = 128 << 20


class BlockAllocator:
    """Hands out offsets of blocks in `[0, capacity)`; `capacity` is a power of two."""

    def __init__(self, capacity: int, kept_bytes: int = KEPT_BYTES) -> None:
        assert capacity >= MIN_BLOCK, capacity
        assert capacity & (capacity - 1) == 0, f"capacity {capacity} is not a power of two"
        self.capacity = capacity
        self._kept_limit = kept_bytes
        self._kept_total = 0
        # Free blocks by size. Dictionaries serve as ordered sets: a buddy is removed by its offset.
        self._free: dict[int, dict[int, None]] = {capacity: {0: None}}
        self._kept: dict[int, list[int]] = {}
        self._used: dict[int, int] = {}
        #: How many bytes of a block, in use or kept, may have pages: what its users asked for at most.
        self._touched: dict[int, int] = {}
        self.used_bytes = 0

    @property
    def block_count(self) -> int:
        return len(self._used)

    def take(self, byte_size: int) -> int | None:
        """Return the offset of a new block of at least `byte_size` bytes, or None where none is left."""
        size = max(MIN_BLOCK, 1 << (byte_size - 1).bit_length())
        kept = self._kept.get(size)
        if kept:
            offset = kept.pop()
            self._kept_total -= self._touched[offset]
        else:
            found = self._split(size)
            if found is None and self._kept_total:
                self._join_all_kept()
                found = self._split(size)
            if found is None:
                return None
            offset = found
        self._used[offset] = size
        self._touched[offset] = max(byte_size, self._touched.get(offset, 0))
        self.used_bytes += size
        return offset

    def give(self, offset: int) -> tuple[int, int] | None:
        """Free the block at `offset`. Returns (offset, size) where its pages should be given back too.

        A block that is not in use is a bug of the caller and raises KeyError.
        """
        size = self._used.pop(offset)
        self.used_bytes -= size
        touched = self._touched[offset]
        if self._kept_total + touched <= self._kept_limit:
            self._kept.setdefault(size, []).append(offset)
            self._kept_total += touched
            return None
        del self._touched[offset]
        self._join(offset, size)
        return offset, size

    def size_of(self, offset: int) -> int:
        """Return the size of the block in use at `offset`."""
        return self._used[offset]

    def _split(self, size: int) -> int | None:
        """Take a free block, halving a larger one as often as it needs."""
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
        """Put a block back, joined with its free neighbours of the same size."""
        while size < self.capacity:
            siblings = self._free.get(size, {})
            buddy = offset ^ size
            if buddy not in siblings:
                break
            del siblings[buddy]
            offset = min(offset, buddy)
            size *= 2
        self._free.setdefault(size, {})[offset] = None

    def _join_all_kept(self) -> None:
        for size, offsets in self._kept.items():
            for offset in offsets:
                del self._touched[offset]
                self._join(offset, size)
        self._kept.clear()
        self._kept_total = 0

    def check(self) -> None:
        """Recompute the invariants: blocks tile the capacity, none overlaps another."""
        blocks = list(self._used.items())
        blocks += [(offset, size) for size, offsets in self._kept.items() for offset in offsets]
        blocks += [(offset, size) for size, offsets in self._free.items() for offset in offsets]
        position = 0
        for offset, size in sorted(blocks):
            assert offset == position, f"gap or overlap at {position}: next block is at {offset}"
            assert offset % size == 0, f"block of {size} bytes at {offset} is not aligned"
            position += size
        assert position == self.capacity
        assert self.used_bytes == sum(self._used.values())
        assert self._kept_total == sum(self._touched[o] for offsets in self._kept.values() for o in offsets)
        assert len(self._touched) == len(self._used) + sum(map(len, self._kept.values()))
        assert self._kept_total <= self._kept_limit
