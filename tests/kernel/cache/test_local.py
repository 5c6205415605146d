"""The cache in memory: the least recently used entries go first, and memory is counted and given back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.cache.local import ENTRY_BYTE_SIZE, SLICE_BYTE_SIZE, LocalCache
from shm.arena import Arena
from shm.blocks import ByteBudget
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.cache.interface import CachedResponse

MIB = 1 << 20


class Case:
    """A cache, and what it has put off to later event-loop iterations."""

    def __init__(self, byte_size: int, budget: int = 64 * MIB) -> None:
        self.budget = ByteBudget(budget)
        self.later: list[Callable[[], None]] = []
        self.cache = LocalCache(byte_size, self.budget, later=self.later.append)

    def put(self, key: str, data: bytes, name: str = "OUT") -> bool:
        return self.cache.insert(key.encode(), [Tensor(name, "UINT8", [len(data)], data)], None, dict)

    def find(self, key: str) -> CachedResponse | None:
        found: list[CachedResponse | None] = []
        self.cache.lookup(key.encode(), found.append, dict)
        [response] = found
        return response

    def has(self, key: str) -> bool:
        response = self.find(key)
        if response is not None:
            response.release()
        return response is not None

    def finish(self) -> None:
        while self.later:
            self.later.pop(0)()


def in_arena(arena: Arena, data: bytes) -> Tensor:
    """Return an output in a block of `arena`, with its lease."""
    block = arena.take(len(data))
    assert block is not None
    block.view()[:] = data
    return Tensor("OUT", "UINT8", [len(data)], None, block.span)


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case(4 * MIB)
    yield made
    asyncio.run(made.cache.close())
    assert made.budget.used_byte_size == 0
    assert made.cache.figures.used_byte_size == 0


def test_what_was_stored_is_found_with_its_parameters(case: Case) -> None:
    outputs = [Tensor("A", "FP32", [1], b"1234"), Tensor("B", "UINT8", [2, 3000], bytes(range(250)) * 24)]
    assert case.find("a") is None
    assert case.cache.insert(b"a", outputs, {"p": 1}, dict)
    found = case.find("a")
    assert found is not None
    assert [(t.name, t.datatype, t.shape, bytes(t.raw())) for t in found.outputs] == [
        ("A", "FP32", [1], b"1234"),
        ("B", "UINT8", [2, 3000], bytes(range(250)) * 24),
    ]
    assert (found.parameters, found.leased) == ({"p": 1}, True)
    found.release()
    figures = case.cache.figures
    assert (figures.lookups, figures.hits, figures.misses, figures.entries) == (2, 1, 1, 1)


def test_a_small_response_has_no_lease(case: Case) -> None:
    case.put("a", b"1234")
    found = case.find("a")
    assert found is not None
    assert (found.leased, found.outputs[0].data, found.parameters) == (False, b"1234", None)


def test_a_key_is_stored_once(case: Case) -> None:
    assert case.put("a", b"first")
    assert not case.put("a", b"other")
    found = case.find("a")
    assert found is not None
    assert found.outputs[0].data == b"first"


def test_what_was_not_used_for_the_longest_time_goes_first(case: Case) -> None:
    for key in "abc":
        case.put(key, bytes(MIB))
    assert case.has("a")
    case.put("d", bytes(MIB))
    assert [case.has(key) for key in "abcd"] == [True, False, True, True]
    assert case.cache.figures.evictions == 1


def test_all_entries_together_stay_within_the_size(case: Case) -> None:
    for number in range(300):
        case.put(str(number), bytes(number * 997 % 50_000))
        assert case.cache.figures.used_byte_size <= 4 * MIB
        assert case.budget.used_byte_size <= 4 * MIB
    assert case.cache.figures.evictions > 0


def test_small_entries_are_bounded_by_what_their_objects_take() -> None:
    case = Case(100 * ENTRY_BYTE_SIZE)
    for number in range(1000):
        case.put(str(number), b"")
    assert 0 < case.cache.figures.entries <= 100


def test_a_response_larger_than_the_cache_is_not_stored_and_removes_nothing(case: Case) -> None:
    case.put("a", bytes(MIB))
    assert case.put("b", bytes(5 * MIB))
    assert (case.has("a"), case.has("b")) == (True, False)
    assert case.cache.figures.not_stored == 1


def test_a_response_stays_readable_when_its_entry_is_removed(case: Case) -> None:
    case.put("a", b"x" * MIB)
    found = case.find("a")
    assert found is not None
    for key in "bcde":
        case.put(key, b"y" * MIB)
    assert not case.has("a")
    assert bytes(found.outputs[0].raw()) == b"x" * MIB
    found.release()


def test_the_cache_copies_what_is_in_memory_of_others(case: Case) -> None:
    with Arena("worker", 1 << 20) as arena:
        output = in_arena(arena, b"z" * 10_000)
        case.cache.insert(b"a", [output], None, dict)
        output.release()
        assert arena.allocator.block_count == 0
    found = case.find("a")
    assert found is not None
    assert bytes(found.outputs[0].raw()) == b"z" * 10_000
    found.release()


def test_a_large_response_is_copied_in_slices_and_found_when_it_is_complete(case: Case) -> None:
    data = bytes(range(256)) * (3 * SLICE_BYTE_SIZE // 256) + b"end"
    with Arena("worker", 1 << 23) as arena:
        output = in_arena(arena, data)
        case.cache.insert(b"a", [output], None, dict)
        output.release()
        assert len(case.later) == 1
        assert not case.has("a")
        assert not case.put("a", b"other")
        assert arena.allocator.block_count == 1
        case.finish()
        assert arena.allocator.block_count == 0
    found = case.find("a")
    assert found is not None
    assert bytes(found.outputs[0].raw()) == data
    found.release()


def test_a_cache_that_is_closed_gives_back_what_it_was_copying() -> None:
    case = Case(8 * MIB)
    with Arena("worker", 1 << 23) as arena:
        output = in_arena(arena, bytes(3 * MIB))
        case.cache.insert(b"a", [output], None, dict)
        output.release()
        asyncio.run(case.cache.close())
        case.finish()
        assert arena.allocator.block_count == 0
    assert case.budget.used_byte_size == 0


def test_nothing_is_stored_where_the_servers_budget_has_no_room() -> None:
    case = Case(4 * MIB, budget=MIB)
    case.budget.add(MIB - 3000)
    assert case.put("a", bytes(10_000))
    assert case.put("b", b"1")
    assert (case.has("a"), case.has("b")) == (False, True)
    assert case.cache.figures.not_stored == 1
    asyncio.run(case.cache.close())
    assert case.budget.used_byte_size == MIB - 3000
