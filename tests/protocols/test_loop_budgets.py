"""How many small messages, bytes of large ones and time for medium ones an event-loop iteration has, and who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocols.loop_budgets import (
    FREE_US,
    ITERATION_BYTE_SIZE,
    ITERATION_MESSAGE_COUNT,
    ITERATION_NS,
    ITERATION_US,
    IterationBudget,
    LoopBudget,
    MessageBudget,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Loop:
    """Calls back when a test begins the next iteration."""

    def __init__(self) -> None:
        self.scheduled: list[Callable[[], None]] = []

    def in_next_iteration(self, callback: Callable[[], None]) -> None:
        self.scheduled.append(callback)

    def begin_iteration(self) -> None:
        scheduled, self.scheduled = self.scheduled, []
        for callback in scheduled:
            callback()


class Connection:
    """Has messages, and handles as many as it may."""

    def __init__(self, budget: MessageBudget, message_count: int) -> None:
        self._budget = budget
        self.left = message_count
        self.handled: list[int] = []

    def handle(self) -> None:
        count = min(self.left, self._budget.room)
        self.left -= count
        self.handled.append(count)
        if count > 1:
            self._budget.handled(count)
        if self.left:
            self._budget.wait(self.handle)


def lab(least: int = 1, most: int = 32) -> tuple[Loop, MessageBudget]:
    loop = Loop()
    return loop, MessageBudget(least, most, loop.in_next_iteration)


def test_single_messages_schedule_nothing() -> None:
    loop, budget = lab()
    for _ in range(100):
        Connection(budget, 1).handle()
    assert (budget.room, loop.scheduled) == (32, [])


def test_each_connection_that_is_read_gets_its_least_when_the_budget_is_used_up() -> None:
    _, budget = lab(least=2)
    connections = [Connection(budget, 32) for _ in range(10)]
    for connection in connections:
        connection.handle()
    assert [connection.handled for connection in connections] == [[32], [32]] + [[2]] * 8


def test_an_iteration_has_a_limited_number_of_messages_of_connections_that_wait() -> None:
    loop, budget = lab()
    connections = [Connection(budget, 32) for _ in range(600)]
    for connection in connections:
        connection.handle()
    iterations = 0
    while any(connection.left for connection in connections):
        before = sum(connection.left for connection in connections)
        loop.begin_iteration()
        assert 0 < before - sum(connection.left for connection in connections) <= ITERATION_MESSAGE_COUNT
        iterations += 1
    assert iterations > 250


def test_connections_that_wait_get_equal_parts_in_the_order_in_which_they_came() -> None:
    loop, budget = lab()
    for _ in range(2):
        Connection(budget, 32).handle()
    few, many = Connection(budget, 3), [Connection(budget, 1000) for _ in range(8)]
    for connection in (*many, few):
        connection.handle()
    loop.begin_iteration()
    assert not few.left
    loop.begin_iteration()
    counts = [sum(connection.handled) for connection in many]
    assert max(counts) - min(counts) <= 4


def test_a_connection_alone_gets_the_whole_budget() -> None:
    loop, budget = lab()
    alone = Connection(budget, 1000)
    alone.handle()
    loop.begin_iteration()
    assert sum(alone.handled) == 32 + ITERATION_MESSAGE_COUNT
    assert len(loop.scheduled) == 1


def test_the_budget_is_whole_again_in_the_next_iteration() -> None:
    loop, budget = lab()
    for _ in range(3):
        Connection(budget, 32).handle()
    assert budget.room == 1
    for _ in range(2):
        loop.begin_iteration()
    assert (budget.room, loop.scheduled) == (32, [])


def test_connections_that_have_nothing_left_do_not_end_the_waiting_of_others() -> None:
    loop, budget = lab()
    closed = [Connection(budget, 0) for _ in range(2 * ITERATION_MESSAGE_COUNT)]
    last = Connection(budget, 1)
    for connection in (*closed, last):
        budget.wait(connection.handle)
    while loop.scheduled:
        loop.begin_iteration()
    assert not last.left


def test_messages_that_take_long_use_the_iteration_up_by_their_time() -> None:
    loop, budget = lab()
    budget.spent(ITERATION_NS // 2)
    assert budget.room == 32
    budget.spent(ITERATION_NS // 2)
    budget.handled(2)
    assert budget.room == 0, "every other connection waits"
    slow = SlowConnection(budget, 5)
    other = Connection(budget, 1)
    budget.wait(slow.handle)
    budget.wait(other.handle)
    loop.begin_iteration()
    assert (slow.left, other.left, budget.room) == (4, 1, 0)
    loop.begin_iteration()
    assert (slow.left, other.left) == (3, 0), "the connection that had waited longer was first"
    while slow.left:
        loop.begin_iteration()
    loop.begin_iteration()
    assert (budget.room, loop.scheduled) == (32, [])


class SlowConnection(Connection):
    """Has messages of which each takes an iteration."""

    def handle(self) -> None:
        self.left -= 1
        self._budget.spent(ITERATION_NS)
        if self.left:
            self._budget.wait(self.handle)


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
