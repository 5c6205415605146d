"""Arenas are anonymous, shared by descriptor, and sparse."""

from __future__ import annotations

import mmap
import os

from shm.arena import Arena


def test_bytes_written_to_a_block_are_seen_by_whoever_maps_the_descriptor() -> None:
    with Arena("test", 1 << 20) as arena:
        block = arena.take(5000)
        assert block is not None
        block.view()[:] = b"x" * 5000
        with mmap.mmap(arena.region.fd, 1 << 20, prot=mmap.PROT_READ) as seen:
            assert seen[block.offset : block.offset + 5000] == b"x" * 5000
        block.release()
        assert arena.allocator.block_count == 0


def test_an_arena_has_no_name_in_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))
    with Arena("test", 1 << 20):
        assert set(os.listdir("/dev/shm")) == before


def test_an_arena_costs_no_memory_before_it_is_written() -> None:
    with Arena("test", 1 << 34) as arena:
        assert os.fstat(arena.region.fd).st_blocks == 0


def test_a_full_arena_says_so() -> None:
    with Arena("test", 1 << 16) as arena:
        block = arena.take(1 << 16)
        assert block is not None
        assert arena.take(1) is None
        block.release()
        block.release()
        again = arena.take(1 << 16)
        assert again is not None
        again.release()


def test_closing_closes_the_descriptor() -> None:
    arena = Arena("test", 1 << 16)
    arena.close()
    assert arena.region.closed
