"""When a helper gets the next task of what waits to be written."""

from __future__ import annotations

import asyncio

import pytest

from kernel.errors import ServingError, Unavailable
from kernel.serving.helper_tasks import HelperTask, MessageTask
from kernel.writing.write_turns import WriteTurns

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
        async with asyncio.timeout(10):
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
