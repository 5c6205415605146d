"""Time as the kernel sees it: monotonic nanoseconds, and one alarm per scheduler."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from kernel.loop.busy_poll import GivingWay, give_way
from kernel.loop.iteration_end import IterationEnd
from kernel.loop.timer import Timer

if TYPE_CHECKING:
    from collections.abc import Callable


#: A time for alarms: the end of this turn of the loop, see `kernel.loop.iteration_end`.
ITERATION_END = 0


class Clock(Protocol):
    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""

    def wall_ns(self) -> int:
        """Return nanoseconds since the epoch, for what is shown to people."""

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        """Return an alarm that calls `callback`."""


class Alarm(Protocol):
    def set(self, at_ns: int | None) -> None:
        """Ring once, not before `at_ns`, or at `ITERATION_END`. Replaces an earlier setting; None only clears it."""

    def close(self) -> None:
        """Clear it, and give back what it holds until it is set again."""


class LoopClock:
    """The clock of a running asyncio loop."""

    #: Asked for each request: without a frame of Python.
    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)

    def __init__(self, poll_ns: int = 0) -> None:
        """Alarms that ring in `poll_ns` or less are polled for, see `kernel.loop.busy_poll`."""
        self._poll_ns = poll_ns
        self._giving_way = GivingWay()

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        return LoopAlarm(asyncio.get_running_loop(), callback, self._poll_ns, self._giving_way)


class LoopAlarm:
    """An alarm on a `Timer`, which is made at the first use.

    The timer is left as it is where it will expire soon enough, and asked again then: a scheduler that waits for each
    batch anew, and mostly in vain, costs a system call in each of its delays, not in each of its waits.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None], poll_ns: int, giving_way: GivingWay
    ) -> None:
        """Polled for where it rings in `poll_ns` or less, and others do not need the processor."""
        self._loop = loop
        self._callback = callback
        self._poll_ns = poll_ns
        self._giving_way = giving_way
        self._turn_end = IterationEnd.here()
        self._timer: Timer | None = None
        self._at_ns: int | None = None
        #: When the timer expires; None for never.
        self._timer_ns: int | None = None
        #: Whether the loop is kept turning, and whether the end of its turn is waited for.
        self._polling = False
        self._turn_ends = False

    def set(self, at_ns: int | None) -> None:
        self._at_ns = at_ns
        if at_ns == ITERATION_END:
            if not self._turn_ends:
                self._turn_ends = True
                self._turn_end.decide(self._turn_ended)
            return
        if at_ns is None or self._polling:
            return
        if self._poll_ns and self._polls(at_ns):
            self._polling = True
            self._loop.call_soon(self._turn)
        elif self._timer_ns is None or at_ns < self._timer_ns:
            self._arm(at_ns)

    def close(self) -> None:
        self._at_ns = self._timer_ns = None
        if self._timer is not None:
            timer, self._timer = self._timer, None
            timer.close()

    def _polls(self, at_ns: int) -> bool:
        now_ns = time.monotonic_ns()
        return at_ns - now_ns <= self._poll_ns and now_ns >= self._giving_way.until_ns

    def _turn(self) -> None:
        self._polling = False
        self._giving_way.gave(*give_way())
        self._ring_or_wait()

    def _turn_ended(self) -> None:
        self._turn_ends = False
        if self._at_ns == ITERATION_END:
            self._at_ns = None
            self._callback()

    def _arm(self, at_ns: int) -> None:
        self._timer_ns = at_ns
        if self._timer is None:
            try:
                self._timer = Timer(self._loop, self._expired)
            except OSError:  # no file descriptor is left: to the millisecond, then
                self._loop.call_later((at_ns - time.monotonic_ns()) / 1e9, self._expired)
                return
        self._timer.set(at_ns)

    def _expired(self) -> None:
        self._timer_ns = None
        self._ring_or_wait()

    def _ring_or_wait(self) -> None:
        at_ns = self._at_ns
        if at_ns is None or at_ns == ITERATION_END:
            return
        if at_ns > time.monotonic_ns():
            self.set(at_ns)
            return
        self._at_ns = None
        self._callback()
