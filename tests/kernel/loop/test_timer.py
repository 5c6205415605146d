"""A timer calls once, not before its time, and not if it was set again or closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from kernel.loop.timer import Timer
from tests.kernel.loop.rings import Rings
from tests.open_descriptors import open_descriptors

Run = Callable[[Coroutine[None, None, None]], None]
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
MS = 10**6


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
