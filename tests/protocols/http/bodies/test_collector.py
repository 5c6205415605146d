"""Bodies that aiohttp receives: small ones in ordinary memory, others in blocks of their model."""

from __future__ import annotations

import os

import pytest

from kernel.errors import ArenaFull
from protocols.body_sizes import RECEIVE_BUFFER_BYTE_SIZE
from protocols.http.bodies.collector import BodyCollector
from shm.arena import Arena, Block


class Lab:
    def __init__(self, announced: int | None, capacity: int = 1 << 24) -> None:
        self.arena = Arena("bodies", capacity)
        self.collector = BodyCollector(self.take, announced)

    def take(self, byte_size: int) -> Block:
        block = self.arena.take(byte_size)
        if block is None:
            raise ArenaFull(byte_size)
        return block

    def add(self, body: bytes, part: int) -> None:
        for start in range(0, len(body), part):
            self.collector.add(body[start : start + part])


def test_a_small_body_takes_no_block() -> None:
    lab = Lab(None)
    body = os.urandom(RECEIVE_BUFFER_BYTE_SIZE)
    lab.add(body, 1000)
    assert lab.collector.is_small
    assert lab.collector.body() == body
    (source,) = lab.collector.sources()
    assert (source.data, lab.arena.allocator.block_count) == (body, 0)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("part", [999, 70_000, 10_000_000])
def test_a_large_body_lies_in_blocks_in_its_order(announced: bool, part: int) -> None:
    body = os.urandom(3_000_000)
    lab = Lab(len(body) if announced else None)
    lab.add(body, part)
    assert not lab.collector.is_small
    sources = lab.collector.sources()
    assert b"".join(bytes(source.raw()) for source in sources) == body
    assert not announced or len(sources) == 1, "memory of the announced size"
    assert sum(source.byte_size for source in sources) == len(body)
    lab.collector.release()
    assert lab.arena.allocator.block_count == len(sources), "the leases are the caller's"
    for source in sources:
        source.release()
    assert lab.arena.allocator.block_count == 0


def test_blocks_of_unknown_bodies_grow() -> None:
    lab = Lab(None)
    lab.add(bytes(4_000_000), 4096)
    assert 3 <= lab.arena.allocator.block_count <= 6
    assert lab.arena.allocator.used_bytes <= 2 * 4_000_000 + (256 << 10)
    lab.collector.release()
    lab.collector.release()
    assert lab.arena.allocator.block_count == 0


def test_a_body_that_is_longer_than_announced_is_kept_as_well() -> None:
    lab = Lab(100_000)
    body = os.urandom(400_000)
    lab.add(body, 90_000)
    assert b"".join(bytes(source.raw()) for source in lab.collector.sources()) == body


def test_without_memory_the_body_is_refused() -> None:
    lab = Lab(1 << 20, capacity=1 << 18)
    with pytest.raises(ArenaFull):
        lab.add(bytes(1 << 20), 4096)
    lab.collector.release()
    assert lab.arena.allocator.block_count == 0
