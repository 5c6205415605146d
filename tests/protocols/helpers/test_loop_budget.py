"""How much work on medium messages the event loop does in one iteration."""

from __future__ import annotations

from protocols.helpers.loop_budget import FREE_US, ITERATION_US, LoopBudget


def test_work_that_takes_less_time_than_the_way_to_a_helper_is_always_taken() -> None:
    budget = LoopBudget()
    assert budget.take(ITERATION_US)
    assert all(budget.take(FREE_US) for _ in range(1000))


def test_free_work_leaves_the_budget_fresh() -> None:
    budget = LoopBudget()
    budget.take(FREE_US)
    assert budget.is_fresh


def test_one_piece_of_work_may_not_take_longer_than_an_iteration_has() -> None:
    budget = LoopBudget()
    assert not budget.take(ITERATION_US + 1)
    assert budget.is_fresh


def test_pieces_of_work_are_taken_until_the_iteration_has_no_time_left() -> None:
    budget = LoopBudget()
    assert [budget.take(ITERATION_US * 0.4) for _ in range(4)] == [True, True, False, False]
    assert not budget.is_fresh


def test_the_next_iteration_has_all_of_the_time_again() -> None:
    budget = LoopBudget()
    budget.take(ITERATION_US)
    assert not budget.take(ITERATION_US)
    budget.reset()
    assert budget.take(ITERATION_US)
