"""The allocator never hands out overlapping blocks, and forgets nothing."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shm.blocks import MIN_BLOCK, BlockAllocator

CAPACITY = 64 * MIN_BLOCK


class Blocks(RuleBasedStateMachine):
    """Takes and gives blocks in any order, and checks every invariant after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(CAPACITY, cached_bytes=8 * MIN_BLOCK)
        self.taken: dict[int, int] = {}
        self.returning: list[int] = []

    @rule(byte_size=st.integers(1, CAPACITY))
    def take(self, byte_size: int) -> None:
        offset = self.allocator.take(byte_size)
        if offset is None:
            return
        for other, size in self.taken.items():
            assert offset + byte_size <= other or other + size <= offset, "blocks overlap"
        self.taken[offset] = byte_size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        size = self.taken.pop(offset)
        returning = self.allocator.free(offset)
        if returning is not None:
            assert returning[0] == offset
            assert returning[1] >= size
            self.returning.append(offset)

    @precondition(lambda self: self.returning)
    @rule()
    def return_pages(self) -> None:
        self.allocator.returned(self.returning.pop())

    @invariant()
    def consistent(self) -> None:
        self.allocator.check()
        assert self.allocator.block_count == len(self.taken)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase


def test_everything_can_be_taken_again_after_it_was_given_back() -> None:
    allocator = BlockAllocator(CAPACITY)
    offsets = [allocator.take(MIN_BLOCK) for _ in range(64)]
    assert None not in offsets
    assert allocator.take(1) is None
    for offset in offsets:
        assert offset is not None
        allocator.free(offset)
    assert allocator.take(CAPACITY) == 0
    allocator.check()


def test_a_block_given_back_is_the_next_one_taken() -> None:
    allocator = BlockAllocator(CAPACITY)
    allocator.take(MIN_BLOCK)
    second = allocator.take(3 * MIN_BLOCK)
    assert second is not None
    assert allocator.free(second) is None
    assert allocator.take(4 * MIN_BLOCK) == second


def test_pages_of_blocks_beyond_the_kept_ones_are_given_back() -> None:
    allocator = BlockAllocator(CAPACITY, cached_bytes=MIN_BLOCK)
    offset = allocator.take(8 * MIN_BLOCK)
    assert offset is not None
    assert allocator.free(offset) == (offset, 8 * MIN_BLOCK)
    assert allocator.block_count == allocator.used_bytes == 0
    assert allocator.take(CAPACITY) is None, "it still has pages"
    allocator.returned(offset)
    assert allocator.take(CAPACITY) == 0


def test_giving_a_block_twice_is_an_error() -> None:
    allocator = BlockAllocator(CAPACITY)
    offset = allocator.take(1)
    assert offset is not None
    allocator.free(offset)
    with pytest.raises(KeyError):
        allocator.free(offset)
