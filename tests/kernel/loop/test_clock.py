"""An alarm rings once and not early, whether it is polled for or not, and asks the system for little."""

from __future__ import annotations

import asyncio
import errno
import time

import pytest

from kernel.loop import clock as clock_module
from kernel.loop.busy_poll import GivingWay
from kernel.loop.clock import ITERATION_END, LoopAlarm, LoopClock
from kernel.loop.timer import Timer
from tests.kernel.loop.rings import Rings

MS = 10**6


class AlarmRings(Rings):
    """An alarm of the running loop, and when it rang."""

    def __init__(self, poll_ns: int = 0) -> None:
        super().__init__()
        self.alarm = LoopClock(poll_ns).alarm(self.ring)


@pytest.mark.parametrize("poll_ns", [0, MS, 10 * MS])
@pytest.mark.parametrize("ahead_ns", [0, 200_000, 3 * MS])
def test_it_rings_once_and_not_early(poll_ns: int, ahead_ns: int) -> None:
    async def scenario() -> None:
        rings, later = AlarmRings(poll_ns), AlarmRings()
        at_ns = time.monotonic_ns() + ahead_ns
        rings.alarm.set(at_ns)
        assert await rings.one_more() >= at_ns
        later.alarm.set(time.monotonic_ns() + MS)
        await later.one_more()
        assert len(rings.times_ns) == 1
        rings.alarm.close()
        later.alarm.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("poll_ns", [0, 10 * MS])
def test_what_was_cleared_or_put_off_does_not_ring(poll_ns: int) -> None:
    async def scenario() -> None:
        cleared, closed, put_off, later = AlarmRings(poll_ns), AlarmRings(poll_ns), AlarmRings(poll_ns), AlarmRings()
        now_ns = time.monotonic_ns()
        for rings in (cleared, closed, put_off):
            rings.alarm.set(now_ns + MS)
        cleared.alarm.set(None)
        closed.alarm.close()
        put_off.alarm.set(now_ns + 4 * MS)
        later.alarm.set(now_ns + 2 * MS)
        assert await put_off.one_more() >= now_ns + 4 * MS
        await later.one_more()
        assert cleared.times_ns == closed.times_ns == []
        assert len(later.times_ns) == 1
        closed.alarm.set(time.monotonic_ns() + MS)
        await closed.one_more()
        for rings in (cleared, closed, put_off, later):
            rings.alarm.close()

    asyncio.run(scenario())


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What timers of the system are set to."""
    found: list[int] = []

    class CountedTimer(Timer):
        def set(self, at_ns: int) -> None:
            found.append(at_ns)
            super().set(at_ns)

    monkeypatch.setattr(clock_module, "Timer", CountedTimer)
    return found


@pytest.mark.parametrize("busy", [False, True])
def test_short_waits_are_polled_for_unless_the_processors_are_busy(settings: list[int], busy: bool) -> None:
    async def scenario() -> None:
        giving_way, rung = GivingWay(), asyncio.Event()
        if busy:
            giving_way.until_ns = time.monotonic_ns() + 3600 * 10**9
        alarm = LoopAlarm(asyncio.get_running_loop(), rung.set, 3600 * 10**9, giving_way)
        alarm.set(time.monotonic_ns() + MS)
        assert bool(settings) is busy
        await rung.wait()
        alarm.close()

    asyncio.run(scenario())


def test_waits_that_are_mostly_in_vain_set_the_timer_once(settings: list[int]) -> None:
    async def scenario() -> None:
        rings = AlarmRings()
        first_ns = time.monotonic_ns() + MS
        for number in range(100):
            rings.alarm.set(first_ns + number)
            rings.alarm.set(None)
        rings.alarm.set(first_ns + 100)
        assert await rings.one_more() >= first_ns + 100
        assert settings[0] == first_ns
        assert len(settings) <= 2, "and once more if the first came before the time that counts"
        rings.alarm.close()

    asyncio.run(scenario())


def test_without_a_timer_of_the_system_it_rings_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(clock_module, "Timer", none_left)

    async def scenario() -> None:
        rings = AlarmRings()
        at_ns = time.monotonic_ns() + 2 * MS
        rings.alarm.set(at_ns)
        assert await rings.one_more() >= at_ns
        rings.alarm.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("poll_ns", [0, 10 * MS])
def test_the_end_of_the_turn_rings_once(poll_ns: int) -> None:
    async def scenario() -> None:
        rings = AlarmRings(poll_ns)
        rings.alarm.set(ITERATION_END)
        rings.alarm.set(ITERATION_END)
        assert rings.times_ns == []
        await rings.one_more()
        await asyncio.sleep(0.002)
        assert len(rings.times_ns) == 1
        rings.alarm.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("poll_ns", [0, 10 * MS])
def test_the_end_of_the_turn_and_times_replace_each_other(poll_ns: int) -> None:
    async def scenario() -> None:
        early, late, cleared = AlarmRings(poll_ns), AlarmRings(poll_ns), AlarmRings(poll_ns)
        now_ns = time.monotonic_ns()
        early.alarm.set(now_ns + 3600 * 10**9)
        early.alarm.set(ITERATION_END)
        cleared.alarm.set(ITERATION_END)
        cleared.alarm.set(None)
        late.alarm.set(ITERATION_END)
        late.alarm.set(now_ns + 3 * MS)
        await early.one_more()
        assert await late.one_more() >= now_ns + 3 * MS
        assert [len(rings.times_ns) for rings in (early, late, cleared)] == [1, 1, 0]
        for rings in (early, late, cleared):
            rings.alarm.close()

    asyncio.run(scenario())
