"""Arenas are anonymous, sealed, shared by descriptor, and sparse."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import pytest

from shm.arena import Arena
from shm.blocks import ByteBudget
from shm.region import RegionKind, read_only_fd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shm.arena import Block

CAPACITY = 1 << 16


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena("test", CAPACITY) as made:
        yield made


# ---- blocks ---------------------------------------------------------------------------------


def test_bytes_written_to_a_block_are_seen_by_all_who_map_the_descriptor(arena: Arena) -> None:
    block = arena.take(5000)
    assert block is not None
    block.view()[:] = b"x" * 5000
    with mmap.mmap(arena.region.fd, CAPACITY, prot=mmap.PROT_READ) as seen:
        assert seen[block.offset : block.offset + 5000] == b"x" * 5000
    block.release()
    assert arena.allocator.block_count == 0


def test_a_block_is_a_place_whose_lease_is_the_takers(arena: Arena) -> None:
    block = arena.take(5000)
    assert block is not None
    span = block.span
    assert span.lease is block.lease
    assert (span.lease.region, span.offset, span.byte_size) == (arena.region, block.offset, 5000)
    other = span.shared()
    block.release()
    assert arena.allocator.block_count == 1
    other.lease.release()
    assert arena.allocator.block_count == 0


def test_a_full_arena_says_so(arena: Arena) -> None:
    block = arena.take(CAPACITY)
    assert block is not None
    assert arena.take(1) is None
    block.release()
    block.release()
    again = arena.take(CAPACITY)
    assert again is not None
    again.release()


def test_pages_of_freed_blocks_beyond_those_that_are_kept_go_back_to_the_system() -> None:
    with Arena("test", 1 << 28) as arena:
        kept, given_back = arena.take(1 << 27), arena.take(1 << 20)
        assert kept is not None
        assert given_back is not None
        given_back.view()[:] = b"\1" * (1 << 20)
        written = os.fstat(arena.region.fd).st_blocks
        kept.release()
        given_back.release()
        assert os.fstat(arena.region.fd).st_blocks < written
        again = arena.take(1 << 20)
        assert again is not None
        assert bytes(again.view()[:4096]) == bytes(4096), "a page that was given back is zeros"
        again.release()


@pytest.mark.parametrize("begun", [False, True])
def test_the_steady_pages_of_an_arena_are_never_given_back(begun: bool) -> None:
    calls: list[Callable[[], None]] = []
    arena = Arena("test", 1 << 24, None, calls.append)
    with arena:
        arena.allocator._cache_limit = 0  # pages are given back at once
        steady = 1 << 20
        if not begun:
            arena.region.steady_byte_size = steady
        whole = arena.take(1 << 22)  # it begins before their end, and ends behind it
        assert whole is not None
        whole.view()[:] = b"\1" * (1 << 22)
        whole.release()
        arena.region.steady_byte_size = steady  # also while pages are waiting to be given back
        while calls:
            calls.pop()()
        assert os.fstat(arena.region.fd).st_blocks * 512 == steady
        again = arena.take(steady)
        assert again is not None
        assert (again.offset, bytes(again.view()[:4096])) == (0, b"\1" * 4096)
        again.release()
        while calls:
            calls.pop()()
        assert os.fstat(arena.region.fd).st_blocks * 512 == steady
        arena.allocator.check()


def full_arena(later: Callable[[Callable[[], None]], None]) -> tuple[Arena, Block, Block]:
    """Return an arena with a block that is kept when it is freed, and one of 8 MiB with pages, which is not."""
    arena = Arena("test", 1 << 28, None, later)
    kept, given_back = arena.take(1 << 27), arena.take(1 << 23)
    assert kept is not None
    assert given_back is not None
    given_back.view()[:] = b"\1" * (1 << 23)
    return arena, kept, given_back


def test_pages_are_given_back_a_little_at_a_time() -> None:
    calls: list[Callable[[], None]] = []
    arena, kept, given_back = full_arena(calls.append)
    with arena:
        kept.release()
        given_back.release()
        sizes = [os.fstat(arena.region.fd).st_blocks]
        while calls:
            assert len(calls) == 1
            calls.pop()()
            sizes.append(os.fstat(arena.region.fd).st_blocks)
        assert sizes == sorted(set(sizes), reverse=True)
        assert len(sizes) > 2
        assert sizes[-1] == 0
        arena.allocator.check()


def test_a_block_that_needs_memory_which_is_being_given_back_gets_it_at_once() -> None:
    calls: list[Callable[[], None]] = []
    arena, kept, given_back = full_arena(calls.append)
    with arena:
        kept.release()
        given_back.release()
        everything = arena.take(1 << 28)
        assert everything is not None
        assert bytes(everything.view()[: 1 << 28 : 1 << 20]) == bytes(256)
        calls.pop()()
        assert not calls
        everything.release()


def test_what_was_to_be_given_back_is_forgotten_when_the_arena_is_closed() -> None:
    calls: list[Callable[[], None]] = []
    arena, kept, given_back = full_arena(calls.append)
    kept.release()
    given_back.release()
    arena.close()
    calls.pop()()
    assert not calls


# ---- the memory -----------------------------------------------------------------------------


def test_an_arena_has_no_name_in_shared_memory() -> None:
    with Arena("test", CAPACITY) as arena:
        assert os.readlink(f"/proc/self/fd/{arena.region.fd}") == "/memfd:test (deleted)"


def test_an_arena_costs_no_memory_before_it_is_written() -> None:
    with Arena("test", 1 << 34) as arena:
        assert os.fstat(arena.region.fd).st_blocks == 0


@pytest.mark.parametrize("byte_size", [0, CAPACITY - 1, CAPACITY + 1])
def test_nobody_can_change_the_size_of_an_arena(arena: Arena, byte_size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(arena.region.fd, byte_size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(arena.region.fd).st_size == CAPACITY


def test_a_read_only_descriptor_shows_the_arena_and_cannot_change_it(arena: Arena) -> None:
    block = arena.take(4096)
    assert block is not None
    block.view()[:] = b"x" * 4096
    fd = read_only_fd(arena.region.fd)
    try:
        assert os.pread(fd, 4096, block.offset) == b"x" * 4096
        with pytest.raises(PermissionError):
            mmap.mmap(fd, CAPACITY, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"y", 0)
        with mmap.mmap(fd, CAPACITY, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as private:
            private[block.offset] = ord("y")
        assert bytes(block.view()[:1]) == b"x"
    finally:
        os.close(fd)
    block.release()


# ---- the end --------------------------------------------------------------------------------


def test_closing_closes_the_descriptor() -> None:
    arena = Arena("test", CAPACITY)
    assert arena.region.kind is RegionKind.ARENA
    arena.close()
    arena.close()
    assert arena.region.closed


def test_a_block_in_use_keeps_an_arena_readable_that_was_closed() -> None:
    arena = Arena("test", CAPACITY)
    block = arena.take(4096)
    assert block is not None
    block.view()[:] = b"x" * 4096
    arena.close()
    assert not arena.region.closed
    assert bytes(arena.region.view(block.offset, 4096)) == b"x" * 4096
    block.release()
    assert arena.region.closed


def test_arenas_that_share_a_budget_are_full_together() -> None:
    budget = ByteBudget(10_000)
    with Arena("first", CAPACITY, budget) as first, Arena("second", CAPACITY, budget) as second:
        block = first.take(6000)
        assert block is not None
        assert budget.used_byte_size == 6000, "what was asked for, not the size of the block"
        assert second.take(4001) is None
        assert second.allocator.block_count == 0
        shared = block.span.shared()
        block.release()
        assert second.take(4001) is None, "the block is in use"
        shared.lease.release()
        other = second.take(4001)
        assert other is not None
        other.release()
    assert budget.used_byte_size == 0


def test_a_full_arena_takes_nothing_of_the_budget() -> None:
    budget = ByteBudget(1 << 20)
    with Arena("test", CAPACITY, budget) as arena:
        assert arena.take(CAPACITY + 1) is None
    assert budget.used_byte_size == 0


def test_a_block_of_a_closed_arena_counts_until_it_is_released() -> None:
    budget = ByteBudget(1 << 20)
    arena = Arena("test", CAPACITY, budget)
    block = arena.take(5000)
    assert block is not None
    arena.close()
    assert budget.used_byte_size == 5000
    block.release()
    assert budget.used_byte_size == 0


def test_an_arena_may_have_a_name_that_is_longer_than_that_of_a_memfd() -> None:
    for name in ("x" * 1000, "é" * 124 + "x" * 10, "é" * 255, "\udcff" * 300):
        with Arena(name, 1 << 16) as arena:
            assert arena.region.name == name
