"""When freed memory is given back to the system."""

from __future__ import annotations

from kernel.memory.trimming import LATEST_NS, LEAST_BYTE_SIZE, LEAST_INTERVAL_NS, Trimming

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
    assert not trimming.is_due(0, start + LATEST_NS - 1, idle=False)
    assert trimming.is_due(0, start + LATEST_NS, idle=False)
