"""Logs what one worker prints and what its model logs, within limits, under the worker's title."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from backends.supervision.output_limits import OutputAllowance

if TYPE_CHECKING:
    from backends.supervision.output_limits import OutputLimits
    from kernel.loop.clock import Clock

logger = logging.getLogger("model")

#: Above the limits all output is dropped for this time. Then one line says how much it was.
PAUSE_NS = 1_000_000_000


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
        self._closed = False

    def log(self, level: int, text: str) -> None:
        """Log a line, unless the worker has printed too much."""
        if self.may_log(len(text)):
            self.log_always(level, text)
        else:
            self.drop(1, len(text))

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
        logger.warning(
            "%s: %d lines (%d bytes) of output were dropped: more than %d lines or %d bytes per second "
            "(--log-model-lines, --log-model-bytes)",
            self._title, self._dropped_lines, self._dropped_bytes,
            self._limits.lines_per_s, self._limits.bytes_per_s,
        )  # fmt: skip
        self._dropped_lines = self._dropped_bytes = 0

    def close(self) -> None:
        """The worker has ended: say what was dropped. What it still says is logged without a limit: it is little."""
        self._closed = True
        self._resume_alarm.close()
        self._resume()
