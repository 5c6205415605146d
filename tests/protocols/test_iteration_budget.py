"""How many bytes of large messages are moved in one event-loop iteration."""

from __future__ import annotations

from protocols.iteration_budget import ITERATION_BYTE_SIZE, IterationBudget


def test_a_connection_gets_at_most_a_part_of_the_budget_at_a_time() -> None:
    budget = IterationBudget()
    assert budget.is_fresh
    first = budget.room
    assert ITERATION_BYTE_SIZE // 2 < first < ITERATION_BYTE_SIZE
    assert not budget.moved(first)
    assert not budget.is_fresh
    assert budget.room == ITERATION_BYTE_SIZE - first


def test_connections_pause_when_the_budget_is_used_up_but_each_gets_a_little() -> None:
    budget = IterationBudget()
    assert not budget.moved(ITERATION_BYTE_SIZE - 1)
    assert budget.room == 16384
    assert budget.moved(1)
    assert (budget.room, budget.moved(16384)) == (16384, True)
    budget.reset()
    assert budget.is_fresh
    assert not budget.moved(1000)
