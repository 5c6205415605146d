"""Decides when an instance that makes no progress is reported, and when its worker is ended. Pure.

The watchdog checks each instance from time to time, and gets marks (`batch_stages.work_marks`). The same mark
at two checks means that this piece of work made no progress. So no time is measured for a request or batch, and a time
is too short by up to the interval between two looks, never too long.

`ReaderWaits` finds requests whose responses nobody takes: their readers lock others out of an instance. A decoupled
model waits when a client, or a model that has called it, has not taken a number of responses. The time of a request
begins when it is seen to wait, and begins again with each response that is taken.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from kernel.serving.request import Request

#: How long a worker may live after SIGTERM before it is killed, in nanoseconds.
TERM_GRACE_NS = 1_000_000_000

#: How long a worker may take to send the rest of a message, in nanoseconds.
MESSAGE_LIMIT_NS = 30_000_000_000


class ExecutionLimits(msgspec.Struct, frozen=True):
    """How long an execution may take, in nanoseconds."""

    #: After this time it is reported, and again after twice, four times, ... this time; 0 for never.
    report_ns: int = 0
    #: After this time the worker is ended; 0 for never.
    timeout_ns: int = 0
    #: Where the timeout was set, for the error.
    setting: str = ""
    #: Whether a model may have a timeout of its own instead.
    changeable: bool = True
    #: How long a response may wait for its reader; 0 for any time.
    response_wait_ns: int = 0


class Sight(msgspec.Struct, frozen=True):
    """What is seen of an instance at one look."""

    #: The watchdog's time in nanoseconds.
    now_ns: int
    #: See `work_marks`.
    marks: Sequence[Hashable] = ()
    #: Whether the worker's process is stopped by a signal.
    stopped: bool = False
    #: The position in the stream of a message of which only a part has come; None if there is none.
    incomplete_since: int | None = None


class WatchStep(enum.Enum):
    """What to do with the worker."""

    NONE = 0
    #: Send SIGTERM: an execution takes longer than its timeout.
    TERMINATE = 1
    #: Send SIGKILL: the worker has outlived SIGTERM by the grace.
    KILL = 2
    #: Drop the worker: it does not send the rest of a message.
    DROP = 3


class Finding(msgspec.Struct, frozen=True):
    """The result of a look."""

    step: WatchStep
    #: How long the oldest piece of work has made no progress, in nanoseconds.
    busy_ns: int
    #: Whether that is longer than the time after which it is reported.
    overdue: bool
    #: Whether a log line is due.
    report: bool


class InstanceWatch:
    """The looks at one worker."""

    def __init__(self, limits: ExecutionLimits) -> None:
        self.limits = limits
        #: When each mark of the last look was seen first.
        self._since_ns: dict[Hashable, int] = {}
        self._next_report_ns = limits.report_ns
        self._terminated_ns: int | None = None
        #: The unfinished message of the last look, and when it was seen first.
        self._incomplete: tuple[int, int] | None = None

    def look(self, sight: Sight) -> Finding:
        """Take what is seen now, and return what to do about it."""
        now_ns = sight.now_ns
        self._since_ns = {mark: self._since_ns.get(mark, now_ns) for mark in sight.marks}
        busy_ns = now_ns - min(self._since_ns.values(), default=now_ns)
        overdue = 0 < self.limits.report_ns <= busy_ns
        return Finding(self._step(sight, busy_ns), busy_ns, overdue, self._report_is_due(overdue, busy_ns))

    def _step(self, sight: Sight, busy_ns: int) -> WatchStep:
        if self._terminated_ns is not None:
            return WatchStep.KILL if sight.now_ns - self._terminated_ns >= TERM_GRACE_NS else WatchStep.NONE
        if 0 < self.limits.timeout_ns <= busy_ns:
            self._terminated_ns = sight.now_ns
            return WatchStep.TERMINATE
        return WatchStep.DROP if self._message_is_late(sight) else WatchStep.NONE

    def _message_is_late(self, sight: Sight) -> bool:
        position = sight.incomplete_since
        if position is None or sight.stopped:  # a process can be stopped within a send
            self._incomplete = None
        elif self._incomplete is None or self._incomplete[0] != position:
            self._incomplete = (position, sight.now_ns)
        else:
            return sight.now_ns - self._incomplete[1] >= MESSAGE_LIMIT_NS
        return False

    def _report_is_due(self, overdue: bool, busy_ns: int) -> bool:
        if not overdue:
            self._next_report_ns = self.limits.report_ns
            return False
        due = busy_ns >= self._next_report_ns
        while self._next_report_ns <= busy_ns:
            self._next_report_ns *= 2
        return due


def busy_text(name: str, busy_s: float, *, limited: bool) -> str:
    """Return the log line for a long execution of the instance `name`. With `limited` it has a time limit already."""
    text = f"model instance '{name}' busy for {busy_s:.0f} s with one execution; the next lines say where"
    if limited:
        return text
    return f"{text}. --execution-timeout, or the model's parameter naiad.execution_timeout, ends such executions"


class ReaderWaits:
    """The looks at the requests of one worker."""

    def __init__(self) -> None:
        #: When each request was first seen with the same mark.
        self._since_ns: dict[tuple[Request, Hashable], int] = {}

    def overdue(self, blocked: Mapping[Request, Hashable], now_ns: int, limit_ns: int) -> list[Request]:
        """Return the requests that have been blocked for `limit_ns` or longer.

        `blocked` are those that may not respond now, with marks that change with each response that is taken.
        """
        self._since_ns = {item: self._since_ns.get(item, now_ns) for item in blocked.items()}
        return [request for (request, _), since_ns in self._since_ns.items() if now_ns - since_ns >= limit_ns]
