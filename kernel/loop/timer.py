"""A timer with a precision of some microseconds: Linux's timerfd.

The timers of event loops are less precise: uvloop counts in milliseconds, and asyncio rounds waits up to the next
millisecond. Schedulers wait for shorter times (`max_queue_delay_microseconds`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
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
        # The flags of timerfd_create are those of open.
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
