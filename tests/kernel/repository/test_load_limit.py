"""Loads that work count, loads that wait do not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kernel.repository.load_limit import LoadLimit, LoadSlots
from kernel.testing import FakeClock

if TYPE_CHECKING:
    from kernel.repository.load_limit import LoadSlot

MS = 1_000_000


class FakeWorker:
    def __init__(self, demanded: int | None) -> None:
        self.demanded = demanded

    def demanded_ns(self) -> int | None:
        return self.demanded


def test_as_many_loads_begin_as_may_work() -> None:
    slots = LoadSlots(2)
    first = slots.begin()
    assert slots.free
    slots.begin()
    assert not slots.free
    slots.end(first)
    assert slots.free


def test_a_load_that_demands_no_processor_leaves_its_place_to_another() -> None:
    slots = LoadSlots(1)
    number = slots.begin()
    slots.look(0, {number: 500 * MS})
    assert not slots.free, "nothing is known after the first look"
    slots.look(50 * MS, {number: 501 * MS})
    assert slots.free


def test_a_load_that_works_again_counts_again() -> None:
    slots = LoadSlots(1)
    number = slots.begin()
    for now, demanded in ((0, 0), (50, 0), (100, 40)):
        slots.look(now * MS, {number: demanded * MS})
    assert not slots.free


def test_a_load_works_while_it_is_not_known_what_it_demands() -> None:
    slots = LoadSlots(1)
    number = slots.begin()
    slots.look(0, {number: 0})
    slots.look(50 * MS, {number: None})
    slots.look(100 * MS, {number: 0})
    assert not slots.free


def test_a_worker_that_replaces_another_works() -> None:
    slots = LoadSlots(1)
    number = slots.begin()
    slots.look(0, {number: 900 * MS})
    slots.look(50 * MS, {number: 3 * MS})
    assert not slots.free


def test_what_is_told_of_a_load_that_has_ended_is_ignored() -> None:
    slots = LoadSlots(1)
    number = slots.begin()
    slots.end(number)
    slots.look(0, {number: 0})
    assert slots.free


async def begun(limit: LoadLimit, log: list[str], name: str, workers: list[FakeWorker], end: asyncio.Event) -> None:
    async with limit.slot() as slot:
        slot.workers = workers
        log.append(name)
        await end.wait()


def test_loads_begin_in_the_order_in_which_they_asked() -> None:
    async def scenario() -> list[str]:
        limit, log, end = LoadLimit(1, FakeClock()), list[str](), asyncio.Event()
        end.set()
        async with asyncio.TaskGroup() as tasks:
            for name in "abcd":
                tasks.create_task(begun(limit, log, name, [], end))
        return log

    assert asyncio.run(scenario()) == list("abcd")


def test_a_load_begins_while_those_before_it_wait() -> None:
    async def scenario() -> None:
        clock = FakeClock()
        limit, log, end = LoadLimit(1, clock), list[str](), asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for name in "ab":
                tasks.create_task(begun(limit, log, name, [FakeWorker(7 * MS)], end))
            while len(log) < 2:
                clock.advance(50 * MS)
                await asyncio.sleep(0.001)
            end.set()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("turn", ["before its turn", "with its turn"])
def test_a_load_that_is_cancelled_holds_nobody_up(turn: str) -> None:
    async def scenario() -> list[str]:
        limit, log, end = LoadLimit(1, FakeClock()), list[str](), asyncio.Event()
        first, second, third = (asyncio.ensure_future(begun(limit, log, name, [], end)) for name in "abc")
        await asyncio.sleep(0)
        if turn == "with its turn":
            first.cancel()
            await asyncio.sleep(0)  # the second has its turn, and has not run yet
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        end.set()
        await asyncio.gather(first, third, return_exceptions=True)
        async with limit.slot():
            return log

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == ["a", "c"]


def test_what_a_load_demands_is_the_sum_of_its_workers_and_known_if_all_are() -> None:
    async def slot() -> LoadSlot:
        async with LoadLimit(1, FakeClock()).slot() as slot:
            return slot

    found = asyncio.run(slot())
    assert found.demanded_ns() is None
    found.workers = [FakeWorker(3), FakeWorker(4)]
    assert found.demanded_ns() == 7
    found.workers = [FakeWorker(3), FakeWorker(None)]
    assert found.demanded_ns() is None
