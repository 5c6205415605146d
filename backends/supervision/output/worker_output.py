"""Logs what one worker prints and what its model logs, within limits, under the worker's title."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING

from backends.supervision.output.limits import OutputAllowance

if TYPE_CHECKING:
    from backends.supervision.output.limits import OutputLimits
    from kernel.loop.clock import Clock

logger = logging.getLogger("model")

#: Above the limits all output is dropped for this time. Then one line says how much it was.
PAUSE_NS = 1_000_000_000

#: How many lines are logged in one event-loop iteration. Formatting a line takes some 15 µs.
LINES_PER_ITERATION = 32

#: Lines of messages that wait for the next iterations. Without limits there may be more: then the oldest do not wait.
_MAX_WAITING = 10_000

#: The longest text of a message that waits, in characters.
_MAX_TEXT = 8192


class WorkerOutput:
    """The lines of one worker, from its standard streams and from messages."""

    def __init__(self, title: str, limits: OutputLimits, clock: Clock) -> None:
        self._title = title
        self._limits = limits
        self._clock = clock
        self._allowance = OutputAllowance(limits, clock.now_ns())
        self._resume_alarm = clock.alarm(self._resume)
        #: Whether output is dropped now.
        self.dropping = False
        self._dropped_lines = self._dropped_bytes = 0
        #: Lines of messages: those that were logged in this iteration, and those that wait for the next ones.
        self._logged_now = 0
        self._waiting: deque[tuple[int, str]] = deque()
        self._closed = False

    def log(self, level: int, text: str) -> None:
        """Log a line of a message, now or in one of the next event-loop iterations, unless there are too many."""
        if not self.may_log(len(text)):
            self.drop(1, len(text))
            return
        if self._closed:
            self.log_always(level, text)
            return
        if not self._logged_now and not self._waiting:
            asyncio.get_running_loop().call_soon(self._next_iteration)
        if self._logged_now < LINES_PER_ITERATION and not self._waiting:
            self._logged_now += 1
            self.log_always(level, text)
            return
        self._waiting.append((level, text[:_MAX_TEXT]))
        if len(self._waiting) > _MAX_WAITING:
            self.log_always(*self._waiting.popleft())

    def _next_iteration(self) -> None:
        self._logged_now = 0
        for _ in range(min(LINES_PER_ITERATION, len(self._waiting))):
            self.log_always(*self._waiting.popleft())
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def may_log(self, byte_size: int) -> bool:
        """Whether a line of `byte_size` bytes may be logged; if so, it counts. Else output is dropped for a time."""
        if self.dropping:
            return False
        now_ns = self._clock.now_ns()
        if self._closed or self._allowance.take(byte_size, now_ns):
            return True
        self.dropping = True
        self._resume_alarm.set(now_ns + PAUSE_NS)
        return False

    def log_always(self, level: int, text: str) -> None:
        """Log a line that counts already, or that has to be seen."""
        logger.log(level, "%s: %s", self._title, text)

    def drop(self, line_count: int, byte_size: int) -> None:
        """Count output that is not logged."""
        self._dropped_lines += line_count
        self._dropped_bytes += byte_size

    def _resume(self) -> None:
        """Say what was dropped, and log again."""
        self.dropping = False
        if not self._dropped_bytes:
            return
        limits = [
            f"{rate} {unit}"
            for rate, unit in ((self._limits.lines_per_s, "lines"), (self._limits.bytes_per_s, "bytes"))
            if rate
        ]
        logger.warning(
            "%s: %d lines (%d bytes) of output were dropped: more than %s per second "
            "(--log-model-lines, --log-model-bytes)",
            self._title, self._dropped_lines, self._dropped_bytes, " or ".join(limits),
        )  # fmt: skip
        self._dropped_lines = self._dropped_bytes = 0

    def close(self) -> None:
        """The worker has ended: log how much was dropped. Its last lines, which are few, are logged without a limit."""
        self._closed = True
        self._resume_alarm.close()
        while self._waiting:
            self.log_always(*self._waiting.popleft())
        self._resume()
