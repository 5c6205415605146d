"""The allocator never hands out overlapping blocks, and forgets nothing; a budget counts bytes of all who share it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shm.blocks import MIN_BLOCK, SLICE_BYTE_SIZE, BlockAllocator, ByteBudget, ReturnedPages

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


def test_there_is_room_up_to_the_limit_and_again_after_bytes_were_given_back() -> None:
    budget = ByteBudget(100)
    assert budget.has_room(100)
    assert not budget.has_room(101)
    budget.add(60)
    assert budget.has_room(40)
    assert not budget.has_room(41)
    budget.remove(60)
    assert budget.has_room(100)


def test_what_was_added_counts_also_beyond_the_limit() -> None:
    budget = ByteBudget(100)
    budget.add(150)
    assert budget.used_byte_size == 150
    assert not budget.has_room(0), "nothing is admitted until enough was given back"
    budget.remove(50)
    assert budget.has_room(0)


def test_more_cannot_be_given_back_than_was_taken() -> None:
    budget = ByteBudget(100)
    budget.add(1)
    with pytest.raises(AssertionError):
        budget.remove(2)


def test_pages_are_given_back_in_slices_block_after_block() -> None:
    removed: list[tuple[int, int]] = []
    returned: list[int] = []
    pages = ReturnedPages(lambda offset, size: removed.append((offset, size)), returned.append)
    assert not pages
    large, begin = 2 * SLICE_BYTE_SIZE + 4096, 1 << 30
    pages.add(begin, large)
    pages.add(0, 4096)
    for _ in range(3):
        assert returned == []
        pages.step()
    assert removed == [
        (begin, SLICE_BYTE_SIZE), (begin + SLICE_BYTE_SIZE, SLICE_BYTE_SIZE), (begin + 2 * SLICE_BYTE_SIZE, 4096),
    ]  # fmt: skip
    assert returned == [begin]
    pages.finish()
    assert returned == [begin, 0]
    assert not pages
