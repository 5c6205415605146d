"""Gives a helper what waits to be written: when it writes and when it rests, and what was lost before.

Traces and records of the flight recorder are written so: what waits is written together, after a delay, or at once when
it is much. The owner has what waits, and makes a task of it.

A file is copied to add to it, so that what is written seldom costs less. But a rest may only make what waits late: it
ends when a whole task waits, and then the helper, which has low priority, works as long as it is behind.

Of what was lost the log has the first of each cause at once, then now and then. `GroupWriter` has what the writers of
both share.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.helper_tasks import Helpers, HelperTask

#: A task with less than this part of what a task may have costs the kernel more than it is worth without a rest.
_SMALL_TASK = 1 / 8


def is_behind(waiting: float, next_task: float) -> bool:
    """Whether the helper writes without a rest.

    `waiting` and `next_task` are all that waits and what the next task takes of it, in parts of the largest task.
    """
    return waiting >= 1 and next_task >= _SMALL_TASK


def rest_s(took_s: float, factor: float, delay_s: float, waiting: float, next_task: float) -> float:
    """Return the rest after a task that took `took_s` seconds, `factor` times as long unless the helper is behind.

    `delay_s` is how long anything waits for more that is written with it, unless a whole task waits. `waiting` and
    `next_task` are as for `is_behind`.
    """
    if is_behind(waiting, next_task):
        return 0.0
    return max(took_s * factor, 0.0 if waiting >= 1 else delay_s)


class WriteTurns:
    """When the helper gets the next task. Use it only in the kernel's event loop."""

    __slots__ = ("_all_done", "_helpers", "_next_task", "_timer", "closing", "resting", "running")

    def __init__(self, helpers: Helpers, next_task: Callable[[], HelperTask | None]) -> None:
        """`next_task` makes a task of what waits; None if nothing does. The owner calls `ended` when it has ended."""
        self._helpers = helpers
        self._next_task = next_task
        self._timer: asyncio.TimerHandle | None = None
        self._all_done: asyncio.Event | None = None
        #: Whether the helper has a task.
        self.running = False
        #: Whether the helper has no task and none is due: then something that comes calls `soon`.
        self.resting = True
        #: Whether the server waits until all is written.
        self.closing = False

    def soon(self, delay_s: float) -> None:
        """Start a task after `delay_s` seconds, unless one runs or is due."""
        if self.resting:
            self.resting = False
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.now)

    def now(self) -> None:
        """Start a task, unless one runs or nothing waits."""
        if self.running:
            return
        self._cancel_timer()
        task = self._next_task()
        if task is None:
            self.resting = True
            if self._all_done is not None:
                self._all_done.set()
            return
        self.running, self.resting = True, False
        self._helpers.add(task)

    def ended(self, pause_s: float) -> None:
        """The task has ended: start the next one after `pause_s` seconds, at once while the server waits for all."""
        self.running, self.resting = False, True
        if self.closing or not pause_s:
            self.now()
        else:
            self.soon(pause_s)

    async def close(self, timeout_s: float) -> bool:
        """Let the helper write all that waits. Returns whether it has done so within `timeout_s` seconds."""
        self.closing = True
        self._all_done = asyncio.Event()
        self.now()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_done.wait()
        except TimeoutError:
            return False
        finally:
            self._cancel_timer()
        return True

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


#: How often losses for one cause are logged, in seconds.
REPORT_S = 60.0


class _Cause:
    """Losses for one cause."""

    __slots__ = ("reported_s", "unreported", "why")

    def __init__(self) -> None:
        self.reported_s = -REPORT_S
        #: How many the log does not have yet, and why the last of them was lost.
        self.unreported = 0
        self.why = ""


class Losses:
    """Counts losses by cause: a collector that is down also fills the queue, and the log has both."""

    def __init__(self, one: str, many: str) -> None:
        """`one` and `many` are subject and verb of the lines, such as "trace was" and "traces were"."""
        self._one, self._many = one, many
        self._causes: dict[str, _Cause] = {}
        #: How many were lost.
        self.count = 0

    def add(self, count: int, why: str, now_s: float, *, cause: str = "") -> list[str]:
        """Count losses at `now_s`, in monotonic seconds. Returns the lines to log.

        `cause` stands for all texts of `why` that have the same cause; without it, each text is a cause.
        """
        if not count:
            return []
        self.count += count
        found = self._causes.setdefault(cause or why, _Cause())
        found.unreported += count
        found.why = why
        if now_s - found.reported_s < REPORT_S:
            return []
        found.reported_s = now_s
        return self._lines([found])

    def rest(self) -> list[str]:
        """Return the lines about all that was lost and was not logged."""
        return self._lines([cause for cause in self._causes.values() if cause.unreported])

    def _lines(self, causes: list[_Cause]) -> list[str]:
        lines = [f"{each.unreported} {self._one if each.unreported == 1 else self._many} lost: {each.why}"
                 for each in causes]  # fmt: skip
        for each in causes:
            each.unreported = 0
        return lines


#: Appends a record to others in msgpack; and the beginning of a list of them, with their number.
encode_into, ARRAY_32 = msgspec.msgpack.Encoder().encode_into, struct.Struct(">BL")


class GroupWriter(ABC):
    """The queue before a helper that writes. Use it only in the kernel's event loop."""

    def __init__(self, helpers: Helpers, stop: Callable[[], object], one: str, many: str) -> None:
        """`stop` is called when nothing can be written any more; `one` and `many` are as for `Losses`."""
        self.turns = WriteTurns(helpers, self._next_task)
        self._stop = stop
        self._losses = Losses(one, many)
        self._logger = logging.getLogger(type(self).__module__)
        #: How many were written.
        self.written_count = 0

    @abstractmethod
    def _next_task(self) -> HelperTask | None:
        """Return the task of what waits; None if nothing does."""

    @abstractmethod
    def drop_all(self) -> int:
        """Drop what waits; returns how many."""

    @property
    def lost_count(self) -> int:
        """How many were lost."""
        return self._losses.count

    async def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s` seconds; what is left then is lost."""
        await self.turns.close(timeout_s)
        self._lose(self.drop_all(), "the server ends before they are written")
        for line in self._losses.rest():
            self._logger.warning("%s", line)

    def _lose(self, count: int, why: str, *, cause: str = "") -> None:
        """Count what is lost, and log it: the first of each cause at once, then now and then."""
        for line in self._losses.add(count, why, time.monotonic(), cause=cause):
            self._logger.warning("%s", line)
