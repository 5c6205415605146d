"""When freed memory is given back to the system."""

from __future__ import annotations

from kernel.memory.trimming import LEAST_BYTE_SIZE, LEAST_INTERVAL_NS, Trimming

MUCH = 4 * LEAST_BYTE_SIZE - 4


def test_memory_is_given_back_once_when_much_was_used_and_little_is_in_use() -> None:
    trimming = Trimming()
    assert not trimming.is_due(0, 0)
    assert not trimming.is_due(MUCH, 1)
    assert not trimming.is_due(MUCH // 2, 2), "the next requests would take it at once"
    assert trimming.is_due(MUCH // 4, 3)
    assert not trimming.is_due(0, 2 * LEAST_INTERVAL_NS), "too little was freed since"


def test_little_memory_is_kept() -> None:
    trimming = Trimming()
    assert not trimming.is_due(LEAST_BYTE_SIZE - 1, 0)
    assert not trimming.is_due(0, 1)


def test_it_is_not_given_back_again_soon() -> None:
    trimming = Trimming()
    trimming.is_due(MUCH, 0)
    assert trimming.is_due(0, 1)
    trimming.is_due(MUCH, 2)
    assert not trimming.is_due(0, LEAST_INTERVAL_NS)
    assert trimming.is_due(0, LEAST_INTERVAL_NS + 1)
