"""A budget counts the bytes in use of all who share it."""

from __future__ import annotations

import pytest

from shm.budget import ByteBudget


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
