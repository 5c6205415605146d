"""Logs errors and warnings that each request can cause: the first ones in full, then how many more there were.

Without a limit, an error of each request fills the disk with thousands of lines each second. The first lines about a
subject, such as a model, are logged in full. Then most are only counted, until they have become rare.
"""

from __future__ import annotations

import logging
import time
from threading import RLock, Timer

#: Lines are counted for this time; then the log says how many were left out.
WINDOW_NS = 10_000_000_000

#: How many lines are logged in full: in the first window, and in one that follows a window with more lines than that.
FIRST_LINES, LATER_LINES = 10, 1

#: The most subjects that are counted apart.
MOST_SUBJECTS = 1000

_OTHERS = "others"


class _Window:
    """The lines about one subject, for a time."""

    __slots__ = ("left_out", "room", "until_ns")

    def __init__(self, now_ns: int, room: int) -> None:
        self.until_ns = now_ns + WINDOW_NS
        self.room = room
        self.left_out = 0


class RepeatLimit:
    """The lines of one place in the code, by subject."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def take(self, subject: str, now_ns: int) -> bool:
        """Count a line at `now_ns`, in monotonic nanoseconds. Returns whether to log it. Call `ended` before."""
        windows = self._windows
        if subject not in windows and len(windows) >= MOST_SUBJECTS:
            subject = _OTHERS
        window = windows.get(subject)
        if window is None:
            window = windows[subject] = _Window(now_ns, FIRST_LINES)
        if not window.room:
            window.left_out += 1
            return False
        window.room -= 1
        return True

    def ended(self, now_ns: int) -> list[tuple[str, int]]:
        """End windows that are over. Returns their subjects and how many lines were left out, where any were."""
        found: list[tuple[str, int]] = []
        for subject, window in list(self._windows.items()):
            if now_ns < window.until_ns:
                continue
            del self._windows[subject]
            if window.left_out:
                found.append((subject, window.left_out))
                self._windows[subject] = _Window(now_ns, LATER_LINES)
        return found


_NS_PER_S = 1_000_000_000


class LimitedLog:
    """Lines of one kind. Any thread may use it, in the kernel and in workers."""

    def __init__(self, logger: logging.Logger, level: int = logging.ERROR) -> None:
        """Nothing is started before the first line is left out."""
        self.logger = logger
        self.level = level
        self._limit = RepeatLimit()
        # Reentrant: the garbage collector may log while this thread has the lock.
        self._lock = RLock()
        #: Reports what was left out, also if no further line comes.
        self._timer: Timer | None = None

    def log(self, subject: str, text: str, *args: object, exc_info: BaseException | None = None) -> bool:
        """Log a line about `subject`, such as "model 'x'", or only count it. Returns whether it is logged."""
        now_ns = time.monotonic_ns()
        with self._lock:
            ended = self._limit.ended(now_ns)
            logs = self._limit.take(subject, now_ns)
            if not logs and self._timer is None:
                self._timer = Timer(WINDOW_NS / _NS_PER_S, self.report)
                self._timer.daemon = True
                self._timer.start()
        self._report(ended)
        if logs:
            self.logger.log(self.level, text, *args, exc_info=exc_info, stacklevel=2)
        return logs

    def report(self) -> None:
        """Log how many lines were left out until now, where their time is over."""
        with self._lock:
            self._timer = None
            ended = self._limit.ended(time.monotonic_ns())
        self._report(ended)

    def _report(self, ended: list[tuple[str, int]]) -> None:
        for subject, count in ended:
            kind = "errors" if self.level >= logging.ERROR else "warnings"
            text = "%d more such %s of %s in the last %d s"
            self.logger.log(self.level, text, count, kind, subject, WINDOW_NS // _NS_PER_S)
