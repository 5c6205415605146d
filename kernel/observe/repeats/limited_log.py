"""Logs errors and warnings that each request can cause: the first ones in full, then how many more there were."""

from __future__ import annotations

import logging
import threading
import time

from kernel.observe.repeats.repeat_limit import WINDOW_NS, RepeatLimit

_NS_PER_S = 1_000_000_000


class LimitedLog:
    """Lines of one kind. Any thread may use it, in the kernel and in workers."""

    def __init__(self, logger: logging.Logger, level: int = logging.ERROR) -> None:
        """Nothing is started before the first line is left out."""
        self._logger = logger
        self._level = level
        self._limit = RepeatLimit()
        # Reentrant: the garbage collector may log while this thread has the lock.
        self._lock = threading.RLock()
        #: Reports what was left out, also if no further line comes.
        self._timer: threading.Timer | None = None

    def log(self, subject: str, text: str, *args: object, exc_info: BaseException | None = None) -> bool:
        """Log a line about `subject`, such as "model 'x'", or only count it. Returns whether it is logged."""
        now_ns = time.monotonic_ns()
        with self._lock:
            ended = self._limit.ended(now_ns)
            logs = self._limit.take(subject, now_ns)
            if not logs and self._timer is None:
                self._timer = threading.Timer(WINDOW_NS / _NS_PER_S, self.report)
                self._timer.daemon = True
                self._timer.start()
        self._report(ended)
        if logs:
            self._logger.log(self._level, text, *args, exc_info=exc_info, stacklevel=2)
        return logs

    def report(self) -> None:
        """Log how many lines were left out until now, where their time is over."""
        with self._lock:
            self._timer = None
            ended = self._limit.ended(time.monotonic_ns())
        self._report(ended)

    def _report(self, ended: list[tuple[str, int]]) -> None:
        for subject, count in ended:
            kind = "errors" if self._level >= logging.ERROR else "warnings"
            text = "%d more such %s of %s in the last %d s"
            self._logger.log(self._level, text, count, kind, subject, WINDOW_NS // _NS_PER_S)
