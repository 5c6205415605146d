"""How many bytes of large messages are received in one event-loop iteration."""

from __future__ import annotations

from protocols.receive_budget import ITERATION_BYTE_SIZE, ReceiveBudget


def test_a_connection_gets_at_most_a_part_of_the_budget_at_a_time() -> None:
    budget = ReceiveBudget()
    assert budget.is_fresh
    assert budget.room == ITERATION_BYTE_SIZE // 2
    assert not budget.received(budget.room)
    assert not budget.is_fresh
    assert budget.room == ITERATION_BYTE_SIZE // 2


def test_connections_pause_when_the_budget_is_used_up_but_each_gets_a_little() -> None:
    budget = ReceiveBudget()
    assert not budget.received(ITERATION_BYTE_SIZE - 1)
    assert budget.room == 16384
    assert budget.received(1)
    assert (budget.room, budget.received(16384)) == (16384, True)
    budget.reset()
    assert budget.is_fresh
    assert not budget.received(1000)
