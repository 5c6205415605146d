"""When a helper gets the next task of what waits to be written.

What was lost before a helper could write it, and what the log says of it.

How long a helper rests before it writes again.
"""

from __future__ import annotations

import asyncio

import pytest

from kernel.errors import ServingError, Unavailable
from kernel.records.writing import REPORT_S, Losses, WriteTurns, is_behind, rest_s
from kernel.serving.helper_tasks import HelperTask, MessageTask

pytestmark = pytest.mark.anyio


class Owner:
    """Has letters that wait, two of which are a task. The test ends the tasks. Implements `Helpers`."""

    def __init__(self, *letters: str) -> None:
        self.waiting = list(letters)
        self.tasks: list[HelperTask] = []
        self.given: list[bytes] = []
        self.pause_s = 0.0
        self.changed = asyncio.Event()
        self.turns = WriteTurns(self, self._next_task)

    def _next_task(self) -> MessageTask | None:
        taken, self.waiting = self.waiting[:2], self.waiting[2:]
        return MessageTask("write", "".join(taken).encode(), ended=self._ended) if taken else None

    def _ended(self, result: bytes | ServingError) -> None:
        self.turns.ended(self.pause_s)

    def add(self, task: HelperTask) -> None:
        self.tasks.append(task)
        self.given.append(task.arguments)
        self.changed.set()

    def cancel(self, task: HelperTask) -> None:
        raise AssertionError("nothing is cancelled")

    def end(self) -> None:
        self.tasks.pop().done(b"", None)

    async def wait(self) -> None:
        self.changed.clear()
        async with asyncio.timeout(60):
            await self.changed.wait()


async def test_what_comes_waits_for_more() -> None:
    owner = Owner("a")
    owner.turns.soon(0.001)
    owner.waiting.append("b")
    assert not owner.turns.resting
    await owner.wait()
    assert owner.given == [b"ab"]


async def test_the_next_task_waits_for_the_end_of_the_one_before() -> None:
    owner = Owner("a", "b", "c")
    owner.pause_s = 0.001
    owner.turns.now()
    owner.turns.now()
    owner.turns.soon(0)
    assert owner.given == [b"ab"]
    owner.end()
    await owner.wait()
    assert owner.given == [b"ab", b"c"]


async def test_much_that_waits_does_not_wait_for_the_pause() -> None:
    owner = Owner("a", "b")
    owner.pause_s = 1000
    owner.turns.now()
    owner.end()
    owner.waiting.append("c")
    owner.turns.now()
    assert owner.given == [b"ab", b"c"]


async def test_without_a_pause_the_next_task_begins_at_once() -> None:
    owner = Owner("a", "b", "c")
    owner.turns.now()
    owner.end()
    assert owner.given == [b"ab", b"c"]


async def test_after_a_pause_without_work_it_rests() -> None:
    owner = Owner()
    owner.turns.soon(0)
    owner.turns.now()
    assert owner.turns.resting


async def test_closing_writes_all_that_waits_without_pauses() -> None:
    owner = Owner("a", "b", "c")
    owner.pause_s = 1000
    owner.turns.soon(1000)
    async with asyncio.TaskGroup() as tasks:
        closed = tasks.create_task(owner.turns.close(10))
        await owner.wait()
        owner.end()
        owner.end()
    assert (closed.result(), owner.given) == (True, [b"ab", b"c"])


async def test_closing_with_nothing_to_write_is_done_at_once() -> None:
    assert await Owner().turns.close(0)


async def test_closing_does_not_wait_for_ever_for_a_helper() -> None:
    owner = Owner("a")
    assert not await owner.turns.close(0.001)
    owner.tasks.pop().failed(Unavailable("the helper process was stopped"))
    assert owner.turns.resting


def test_the_first_loss_of_each_cause_is_logged_at_once_and_the_next_ones_together() -> None:
    losses = Losses("trace was", "traces were")
    assert losses.add(1, "too many wait", 5.0) == ["1 trace was lost: too many wait"]
    assert losses.add(2, "the helper was lost", 6.0) == ["2 traces were lost: the helper was lost"]
    assert losses.add(3, "too many wait", 5.0 + REPORT_S - 1) == []
    assert losses.add(4, "too many wait", 5.0 + REPORT_S) == ["7 traces were lost: too many wait"]
    assert losses.count == 10


def test_texts_of_one_cause_are_one_cause() -> None:
    losses = Losses("trace was", "traces were")
    assert losses.add(1, "no route to a", 0.0, cause="collector") == ["1 trace was lost: no route to a"]
    assert losses.add(1, "no route to b", 1.0, cause="collector") == []
    assert losses.rest() == ["1 trace was lost: no route to b"]


def test_what_was_not_logged_is_logged_at_the_end_once() -> None:
    losses = Losses("record was", "records were")
    for _ in range(3):
        losses.add(2, "too many wait", 0.0)
    assert losses.rest() == ["4 records were lost: too many wait"]
    assert losses.rest() == []
    assert losses.add(0, "the server ends", 0.0) == []
    assert losses.count == 6


@pytest.mark.parametrize(
    ("took_s", "waiting", "next_task", "expected_s"),
    [
        (0.01, 0.5, 0.5, 0.25),
        (0.2, 0.5, 0.5, 2.0),
        (0.2, 1.0, 1.0, 0.0),
        (0.2, 1.5, 0.5, 0.0),
        (0.2, 2.0, 0.001, 2.0),
        (0.001, 2.0, 0.001, 0.01),
        (0.0, 0.0, 0.0, 0.25),
    ],
)
def test_it_rests_ten_times_as_long_as_it_has_worked_unless_a_large_task_and_more_wait(
    took_s: float, waiting: float, next_task: float, expected_s: float
) -> None:
    assert rest_s(took_s, 10, 0.25, waiting, next_task) == pytest.approx(expected_s)


def test_without_a_factor_what_is_not_a_whole_task_waits_for_more() -> None:
    assert rest_s(5.0, 0, 0.25, 0.9, 0.9) == 0.25
    assert rest_s(5.0, 0, 0.25, 1.0, 0.001) == 0.0


def test_it_is_behind_when_a_whole_task_waits_and_the_next_is_worth_its_costs() -> None:
    assert is_behind(1.0, 1.0)
    assert not is_behind(0.99, 0.99)
    assert not is_behind(5.0, 0.1)
