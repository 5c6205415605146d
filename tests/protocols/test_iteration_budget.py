"""How many bytes of large messages are moved in one event-loop iteration."""

from __future__ import annotations

from protocols.iteration_budget import ITERATION_BYTE_SIZE, IterationBudget


def test_a_connection_gets_what_the_others_have_left() -> None:
    budget = IterationBudget()
    assert budget.is_fresh
    assert budget.room == ITERATION_BYTE_SIZE
    assert not budget.moved(100_000)
    assert not budget.is_fresh
    assert budget.room == ITERATION_BYTE_SIZE - 100_000


def test_connections_pause_when_the_budget_is_used_up_but_each_gets_a_little() -> None:
    budget = IterationBudget()
    assert not budget.moved(ITERATION_BYTE_SIZE - 1)
    assert budget.room == 16384
    assert budget.moved(1)
    assert (budget.room, budget.moved(16384)) == (16384, True)
    budget.reset()
    assert budget.is_fresh
    assert not budget.moved(1000)
