"""When freed memory is given back to the system.

When all objects are looked through for garbage: not while thousands of requests live.
"""

from __future__ import annotations

import gc

from kernel.memory.reclaiming import (
    BUSY_LATEST_NS,
    FEW_REQUESTS,
    KEPT_LATEST_NS,
    LATEST_NS,
    LEAST_BYTE_SIZE,
    LEAST_INTERVAL_NS,
    LEAST_YOUNGER_COLLECTIONS,
    FullCollections,
    GarbageCollection,
    Trimming,
)

MUCH = 4 * LEAST_BYTE_SIZE - 4


def test_memory_is_given_back_once_when_much_was_used_and_little_is_in_use() -> None:
    trimming = Trimming()
    assert not trimming.is_due(0, 0, idle=True)
    assert not trimming.is_due(MUCH, 1, idle=True)
    assert not trimming.is_due(MUCH // 2, 2, idle=True), "the next requests would take it at once"
    assert trimming.is_due(MUCH // 4, 3, idle=True)
    assert not trimming.is_due(0, 2 * LEAST_INTERVAL_NS, idle=True), "too little was freed since"


def test_little_memory_is_kept() -> None:
    trimming = Trimming()
    assert not trimming.is_due(LEAST_BYTE_SIZE - 1, 0, idle=True)
    assert not trimming.is_due(0, 1, idle=True)


def test_it_is_not_given_back_again_soon() -> None:
    trimming = Trimming()
    trimming.is_due(MUCH, 0, idle=True)
    assert trimming.is_due(0, 1, idle=True)
    trimming.is_due(MUCH, 2, idle=True)
    assert not trimming.is_due(0, LEAST_INTERVAL_NS, idle=True)
    assert trimming.is_due(0, LEAST_INTERVAL_NS + 1, idle=True)


def test_a_busy_server_waits_until_it_is_idle_or_for_a_minute() -> None:
    trimming = Trimming()
    trimming.is_due(MUCH, 0, idle=False)
    assert not trimming.is_due(0, 1, idle=False), "a request would wait for it"
    assert trimming.is_due(0, 2, idle=True)
    trimming.is_due(MUCH, 3, idle=False)
    start = 3 + LEAST_INTERVAL_NS
    assert not trimming.is_due(0, start, idle=False)
    assert not trimming.is_due(0, start + KEPT_LATEST_NS - 1, idle=False)
    assert trimming.is_due(0, start + KEPT_LATEST_NS, idle=False)


ENOUGH = LEAST_YOUNGER_COLLECTIONS


def test_an_idle_server_looks_when_there_may_be_garbage() -> None:
    decision = FullCollections()
    assert not decision.is_due(ENOUGH - 1, 0, 0, idle=True)
    assert decision.is_due(ENOUGH, FEW_REQUESTS, 1, idle=True)
    assert decision.is_due(ENOUGH, 0, 2, idle=True)


def test_a_busy_server_looks_once_a_minute() -> None:
    decision = FullCollections()
    assert not decision.is_due(ENOUGH, 0, 5, idle=False)
    assert not decision.is_due(ENOUGH, 0, 4 + BUSY_LATEST_NS, idle=False)
    assert decision.is_due(ENOUGH, 0, 5 + BUSY_LATEST_NS, idle=False)
    assert not decision.is_due(ENOUGH, 0, 6 + BUSY_LATEST_NS, idle=False)


def test_while_many_requests_live_it_waits_for_long_but_not_for_ever() -> None:
    decision = FullCollections()
    assert not decision.is_due(ENOUGH, FEW_REQUESTS + 1, 0, idle=True)
    assert not decision.is_due(ENOUGH, FEW_REQUESTS + 1, LATEST_NS - 1, idle=True)
    assert decision.is_due(ENOUGH, FEW_REQUESTS + 1, LATEST_NS, idle=False)


def test_growing_numbers_of_objects_start_no_full_collection() -> None:
    before, live = gc.get_threshold(), [FEW_REQUESTS + 1]
    garbage = GarbageCollection(lambda: live[0])
    full = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(info)

    garbage.begin()
    gc.callbacks.append(note)
    try:
        kept = [[number] for number in range(300_000)]
        garbage.collect(idle=True)
        assert full == []
        live[0] = 0
        garbage.collect(idle=True)
        assert len(full) == 1
        assert len(kept) == 300_000
    finally:
        gc.callbacks.remove(note)
        garbage.end()
    assert gc.get_threshold() == before
