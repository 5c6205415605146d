from __future__ import annotations

import pytest

from backends.worker.devices.pinning_policy import (
    IDLE_USES,
    MIN_REGION_BYTE_SIZE,
    MIN_USES,
    PinnedBudget,
    PinningPolicy,
)

MIB = 1 << 20


def used(policy: PinningPolicy, number: int, times: int = 1, byte_size: int = MIB, free: int = 8 * MIB) -> object:
    """What is decided after the last of some uses; None for each one before."""
    for _ in range(times - 1):
        assert policy.used(number, byte_size, free, stays=False) is None
    return policy.used(number, byte_size, free, stays=False)


def test_a_region_of_a_client_is_pinned_when_it_was_used_often_and_once() -> None:
    policy = PinningPolicy(8 * MIB)
    assert used(policy, 1, MIN_USES) == []
    assert used(policy, 1, 3 * MIN_USES) is None


@pytest.mark.parametrize("byte_size", [MIN_REGION_BYTE_SIZE - 1, 4 * MIB + 1])
def test_a_region_that_is_too_small_or_more_than_half_of_the_limit_is_never_pinned(byte_size: int) -> None:
    assert used(PinningPolicy(8 * MIB), 1, 3 * MIN_USES, byte_size) is None


def test_an_arena_is_pinned_with_its_first_use_and_stays() -> None:
    policy = PinningPolicy(8 * MIB)
    assert policy.used(1, MIB, 8 * MIB, stays=True) == []
    assert policy.make_room(MIB) == []
    for _ in range(IDLE_USES):
        used(policy, 2)
    assert used(policy, 3, MIN_USES, free=0) is None


def test_regions_that_were_not_used_for_long_make_room_the_longest_unused_first() -> None:
    policy = PinningPolicy(8 * MIB)
    for number in (1, 2, 3):
        assert used(policy, number, MIN_USES) == []
    assert used(policy, 4, MIN_USES, 2 * MIB, free=MIB) is None, "all of them are in use"
    for _ in range(IDLE_USES):
        used(policy, 3)
    assert used(policy, 4, MIN_USES, 2 * MIB, free=MIB) == [1]
    assert policy.gone(2)
    assert not policy.gone(1)
    assert policy.gone(4)


def test_a_batch_that_needs_pinned_memory_gets_it_from_regions_that_are_in_use() -> None:
    policy = PinningPolicy(8 * MIB)
    for number in (1, 2):
        used(policy, number, MIN_USES)
    assert policy.make_room(MIB + 1) == [1, 2]
    assert policy.make_room(1) == []


def test_a_region_without_room_is_looked_at_again_and_one_that_cannot_be_pinned_is_not() -> None:
    policy = PinningPolicy(8 * MIB)
    assert used(policy, 1, MIN_USES) == []
    policy.not_pinned(1, ever=True)
    assert used(policy, 1, MIN_USES) == []
    policy.not_pinned(1, ever=False)
    assert used(policy, 1, 3 * MIN_USES) is None
    assert not policy.gone(1)
    policy.not_pinned(1, ever=True)  # it has gone meanwhile


def test_nothing_is_pinned_where_nothing_can_be() -> None:
    policy = PinningPolicy(8 * MIB)
    policy.stopped = True
    assert used(policy, 1, 3 * MIN_USES) is None
    assert policy.used(2, MIB, 8 * MIB, stays=True) is None


def test_pinned_bytes_are_counted_before_they_are_pinned_and_never_above_the_limit() -> None:
    budget = PinnedBudget(10)
    assert budget.take(8)
    assert not budget.take(3)
    assert (budget.used_byte_size, budget.free_byte_size) == (8, 2)
    budget.give(8)
    assert budget.take(10)
    with pytest.raises(AssertionError, match="more pinned memory was given back than taken"):
        budget.give(11)
