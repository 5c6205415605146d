"""An alarm rings once and not early, with and without polling, and sets the system's timer rarely.

A timer calls once, not before its time, and not if it was set again or closed.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from kernel.loop import clock as clock_module
from kernel.loop.busy_poll import PollPause
from kernel.loop.clock import ITERATION_END, LoopAlarm, LoopClock, Timer
from tests.kernel.loop.rings import Rings
from tests.open_descriptors import open_descriptors

MS = 10**6


class AlarmRings(Rings):
    """An alarm of the running loop, and the times when it rang."""

    def __init__(self, poll_ns: int = 0) -> None:
        super().__init__()
        self.alarm = LoopClock(poll_ns).alarm(self.ring)


@pytest.mark.parametrize("poll_ns", [0, MS, 10 * MS])
@pytest.mark.parametrize("ahead_ns", [0, 200_000, 3 * MS])
def test_an_alarm_rings_once_and_not_early(poll_ns: int, ahead_ns: int) -> None:
    async def scenario() -> None:
        rings, later = AlarmRings(poll_ns), AlarmRings()
        at_ns = time.monotonic_ns() + ahead_ns
        rings.alarm.set(at_ns)
        assert await rings.next_time_ns() >= at_ns
        later.alarm.set(time.monotonic_ns() + MS)
        await later.next_time_ns()
        assert len(rings.times_ns) == 1
        rings.alarm.close()
        later.alarm.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("poll_ns", [0, 10 * MS])
def test_an_alarm_that_was_cleared_or_postponed_does_not_ring(poll_ns: int) -> None:
    async def scenario() -> None:
        cleared, closed, put_off, later = AlarmRings(poll_ns), AlarmRings(poll_ns), AlarmRings(poll_ns), AlarmRings()
        now_ns = time.monotonic_ns()
        for rings in (cleared, closed, put_off):
            rings.alarm.set(now_ns + MS)
        cleared.alarm.set(None)
        closed.alarm.close()
        put_off.alarm.set(now_ns + 4 * MS)
        later.alarm.set(now_ns + 2 * MS)
        assert await put_off.next_time_ns() >= now_ns + 4 * MS
        assert cleared.times_ns == closed.times_ns == []
        await later.next_time_ns()
        assert len(later.times_ns) == 1
        closed.alarm.set(time.monotonic_ns() + MS)
        await closed.next_time_ns()
        for rings in (cleared, closed, put_off, later):
            rings.alarm.close()

    asyncio.run(scenario())


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times to which timers of the system were set."""
    times_ns: list[int] = []

    class RecordedTimer(Timer):
        def set(self, at_ns: int) -> None:
            times_ns.append(at_ns)
            super().set(at_ns)

    monkeypatch.setattr(clock_module, "Timer", RecordedTimer)
    return times_ns


@pytest.mark.parametrize("busy", [False, True])
def test_the_loop_polls_for_near_alarms_unless_polling_pauses(settings: list[int], busy: bool) -> None:
    async def scenario() -> None:
        poll_pause, rung = PollPause(), asyncio.Event()
        if busy:
            poll_pause.until_ns = time.monotonic_ns() + 3600 * 10**9
        alarm = LoopAlarm(asyncio.get_running_loop(), rung.set, 3600 * 10**9, poll_pause)
        alarm.set(time.monotonic_ns() + 1800 * 10**9)  # near for this alarm, and far enough on a busy machine
        assert bool(settings) is busy
        alarm.set(time.monotonic_ns())
        await rung.wait()
        alarm.close()

    asyncio.run(scenario())


def test_an_alarm_that_is_set_and_cleared_often_sets_the_timer_once(settings: list[int]) -> None:
    async def scenario() -> None:
        rings = AlarmRings()
        first_ns = time.monotonic_ns() + 3600 * 10**9  # so far ahead that it does not come while the test runs
        for number in range(100):
            rings.alarm.set(first_ns + number)
            rings.alarm.set(None)
        assert settings == [first_ns]
        at_ns = time.monotonic_ns() + MS
        rings.alarm.set(at_ns)
        assert await rings.next_time_ns() >= at_ns
        rings.alarm.close()

    asyncio.run(scenario())


def test_without_a_free_descriptor_an_alarm_still_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(clock_module, "Timer", none_left)

    async def scenario() -> None:
        rings = AlarmRings()
        at_ns = time.monotonic_ns() + 2 * MS
        rings.alarm.set(at_ns)
        assert await rings.next_time_ns() >= at_ns
        rings.alarm.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("poll_ns", [0, 10 * MS])
def test_an_alarm_for_the_end_of_the_iteration_rings_once(poll_ns: int) -> None:
    async def scenario() -> None:
        rings = AlarmRings(poll_ns)
        rings.alarm.set(ITERATION_END)
        rings.alarm.set(ITERATION_END)
        assert rings.times_ns == []
        await rings.next_time_ns()
        await asyncio.sleep(0.002)
        assert len(rings.times_ns) == 1
        rings.alarm.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("poll_ns", [0, 10 * MS])
def test_the_end_of_the_iteration_and_times_replace_each_other(poll_ns: int) -> None:
    async def scenario() -> None:
        early, late, cleared = AlarmRings(poll_ns), AlarmRings(poll_ns), AlarmRings(poll_ns)
        now_ns = time.monotonic_ns()
        early.alarm.set(now_ns + 3600 * 10**9)
        early.alarm.set(ITERATION_END)
        cleared.alarm.set(ITERATION_END)
        cleared.alarm.set(None)
        late.alarm.set(ITERATION_END)
        late.alarm.set(now_ns + 3 * MS)
        await early.next_time_ns()
        assert await late.next_time_ns() >= now_ns + 3 * MS
        assert [len(rings.times_ns) for rings in (early, late, cleared)] == [1, 1, 0]
        for rings in (early, late, cleared):
            rings.alarm.close()

    asyncio.run(scenario())


Run = Callable[[Coroutine[None, None, None]], None]

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    """Run a scenario on one of the event loops that the server supports."""

    def run_on(scenario: Coroutine[None, None, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(scenario)

    return run_on


class TimerRings(Rings):
    """A timer of the running loop, and the times when it called."""

    def __init__(self) -> None:
        super().__init__()
        self.timer = Timer(asyncio.get_running_loop(), self.ring)


@pytest.mark.parametrize("ahead_ns", [0, -(10**9), 300_000, 3 * MS])
def test_a_timer_calls_once_and_not_early(run: Run, ahead_ns: int) -> None:
    async def scenario() -> None:
        rings = TimerRings()
        at_ns = time.monotonic_ns() + ahead_ns
        rings.timer.set(at_ns)
        assert await rings.next_time_ns() >= at_ns
        other = TimerRings()
        other.timer.set(time.monotonic_ns() + MS)
        await other.next_time_ns()
        assert len(rings.times_ns) == 1

    run(scenario())


def test_a_timer_may_be_set_to_an_earlier_and_to_a_later_time(run: Run) -> None:
    async def scenario() -> None:
        rings = TimerRings()
        rings.timer.set(time.monotonic_ns() + 3600 * 10**9)
        at_ns = time.monotonic_ns() + MS
        rings.timer.set(at_ns)
        assert at_ns <= await rings.next_time_ns() < at_ns + 3600 * 10**9
        rings.timer.set(time.monotonic_ns() + MS)
        at_ns = time.monotonic_ns() + 3 * MS
        rings.timer.set(at_ns)
        assert await rings.next_time_ns() >= at_ns

    run(scenario())


def test_a_timer_that_expired_before_it_was_set_again_does_not_call(run: Run) -> None:
    async def scenario() -> None:
        rings = TimerRings()
        rings.timer.set(time.monotonic_ns())
        rings.timer.set(time.monotonic_ns() + 3600 * 10**9)
        rings.timer._expired()  # as from a loop that had polled the descriptor before
        assert rings.times_ns == []
        at_ns = time.monotonic_ns() + MS
        rings.timer.set(at_ns)
        assert await rings.next_time_ns() >= at_ns
        rings.timer.close()

    run(scenario())


def test_a_closed_timer_does_not_call_and_leaves_no_descriptor_open(run: Run) -> None:
    async def scenario() -> None:
        before = open_descriptors()
        rings = TimerRings()
        rings.timer.set(time.monotonic_ns())
        rings.timer.close()
        other = TimerRings()
        other.timer.set(time.monotonic_ns() + MS)
        await other.next_time_ns()
        assert rings.times_ns == []
        other.timer.close()
        assert open_descriptors() <= before

    run(scenario())
