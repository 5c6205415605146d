"""The kernel's clock: monotonic nanoseconds, and one alarm per scheduler.

Alarms ring within some microseconds, by Linux's timerfd: schedulers wait for short times
(`max_queue_delay_microseconds`). The timers of event loops are less precise: uvloop counts in milliseconds, and asyncio
rounds waits up to the next millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from typing import TYPE_CHECKING, Protocol

from kernel.loop.busy_poll import PollPause, yield_processor
from kernel.loop.iteration_end import IterationEnd

if TYPE_CHECKING:
    from collections.abc import Callable

_TFD_TIMER_ABSTIME = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


_libc = ctypes.CDLL(None, use_errno=True)


class Timer:
    """Calls `callback` on `loop` at the time that was set. Owns a file descriptor. Use it only in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Raises `OSError` if the process has no file descriptor left."""
        # timerfd_create has the flags of open.
        self._fd = _checked(_libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop = loop
        self._callback = callback
        self._spec = _TimerSpec()
        loop.add_reader(self._fd, self._expired)

    def set(self, at_ns: int) -> None:
        """Expire at `at_ns` of `time.monotonic_ns`, or now if that is past. Replaces the earlier time."""
        self._spec.value.seconds, self._spec.value.nanoseconds = divmod(max(at_ns, 1), 10**9)
        _checked(_libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None))

    def close(self) -> None:
        """Never call `callback` again, and close the file descriptor."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the timer was set again after it had expired
            os.read(self._fd, 8)
            self._callback()


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


#: A time for alarms: the end of this event-loop iteration, see `kernel.loop.iteration_end`.
ITERATION_END = 0


class Clock(Protocol):
    """The time of the server. Schedulers get it, so that tests can give them another one."""

    def now_ns(self) -> int:
        """Return monotonic nanoseconds."""

    def wall_ns(self) -> int:
        """Return nanoseconds since the epoch, for timestamps that people read."""

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        """Return an alarm that calls `callback`."""


class Alarm(Protocol):
    def set(self, at_ns: int | None) -> None:
        """Ring once, not before `at_ns`, or at `ITERATION_END`. Replaces an earlier time; None clears the alarm."""

    def close(self) -> None:
        """Clear the alarm and free its system resources. It can be set again."""


class LoopClock:
    """The clock of a running asyncio loop."""

    #: Called for each request, so without a Python frame.
    now_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)

    def __init__(self, poll_ns: int = 0) -> None:
        """The loop polls for alarms that ring within `poll_ns`, see `kernel.loop.busy_poll`."""
        self._poll_ns = poll_ns
        self._poll_pause = PollPause()

    def alarm(self, callback: Callable[[], None]) -> Alarm:
        return LoopAlarm(asyncio.get_running_loop(), callback, self._poll_ns, self._poll_pause)


class LoopAlarm:
    """An alarm on a `Timer`, which is created at its first use.

    If the timer expires before the alarm's time, it is not set again until it has expired. A scheduler sets its alarm
    for each batch and mostly clears it again; this costs one system call per queue delay, not one per batch.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None], poll_ns: int, poll_pause: PollPause
    ) -> None:
        """The loop polls for the alarm if it rings within `poll_ns`, unless `poll_pause` pauses polling."""
        self._loop = loop
        self._callback = callback
        self._poll_ns = poll_ns
        self._poll_pause = poll_pause
        self._iteration_end = IterationEnd.current()
        self._timer: Timer | None = None
        self._at_ns: int | None = None
        #: When the timer expires; None for never.
        self._timer_ns: int | None = None
        #: `_poll` is scheduled for the next iteration.
        self._polling = False
        #: `_iteration_ended` is scheduled for the end of this iteration.
        self._end_scheduled = False

    def set(self, at_ns: int | None) -> None:
        self._at_ns = at_ns
        if at_ns == ITERATION_END:
            if not self._end_scheduled:
                self._end_scheduled = True
                self._iteration_end.add_decision(self._iteration_ended)
            return
        if at_ns is None or self._polling:
            return
        if self._poll_ns and self._may_poll(at_ns):
            self._polling = True
            self._loop.call_soon(self._poll)
        elif self._timer_ns is None or at_ns < self._timer_ns:
            self._arm(at_ns)

    def close(self) -> None:
        self._at_ns = self._timer_ns = None
        if self._timer is not None:
            timer, self._timer = self._timer, None
            timer.close()

    def _may_poll(self, at_ns: int) -> bool:
        now_ns = time.monotonic_ns()
        return at_ns - now_ns <= self._poll_ns and now_ns >= self._poll_pause.until_ns

    def _poll(self) -> None:
        self._polling = False
        self._poll_pause.yielded(*yield_processor())
        self._ring_or_wait()

    def _iteration_ended(self) -> None:
        self._end_scheduled = False
        if self._at_ns == ITERATION_END:
            self._at_ns = None
            self._callback()

    def _arm(self, at_ns: int) -> None:
        self._timer_ns = at_ns
        if self._timer is None:
            try:
                self._timer = Timer(self._loop, self._expired)
            except OSError:  # no file descriptor is left: use a timer of the loop, which counts in milliseconds
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


def in_next_iteration(callback: Callable[[], None]) -> None:
    """Call `callback` in the next event-loop iteration; never if the loop has ended."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop().call_soon(callback)
