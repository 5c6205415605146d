"""Time as the kernel sees it: monotonic nanoseconds, and one alarm per scheduler."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(Protocol):
    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""

    def wall_ns(self) -> int:
        """Return nanoseconds since the epoch, for what is shown to people."""

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        """Return an alarm that calls `callback`."""


class Alarm(Protocol):
    def set(self, at_ns: int | None) -> None:
        """Ring once at `at_ns`, not earlier; replaces what was set before, None only clears it."""


class LoopClock:
    """The clock of a running asyncio loop."""

    #: Asked for each request: without a frame of Python.
    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        return LoopAlarm(asyncio.get_running_loop(), callback)


class LoopAlarm:
    """An alarm on asyncio's timers.

    uvloop rounds timers to milliseconds, so one can fire early: the alarm then goes back to the loop
    until the time has come, which costs less than a millisecond of turns.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._at_ns: int | None = None
        self._handle: asyncio.Handle | None = None

    def set(self, at_ns: int | None) -> None:
        if at_ns == self._at_ns:
            return
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._at_ns = at_ns
        if at_ns is not None:
            self._arm(at_ns - time.monotonic_ns())

    def _arm(self, remaining_ns: int) -> None:
        if remaining_ns < 1_000_000:
            self._handle = self._loop.call_soon(self._ring)
        else:
            self._handle = self._loop.call_later(remaining_ns / 1e9, self._ring)

    def _ring(self) -> None:
        at_ns = self._at_ns
        if at_ns is None:
            return
        remaining_ns = at_ns - time.monotonic_ns()
        if remaining_ns > 0:
            self._arm(remaining_ns)
            return
        self._at_ns = self._handle = None
        self._callback()
