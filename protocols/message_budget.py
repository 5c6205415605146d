"""How many small messages a front door handles in one event-loop iteration, and which connections wait. Pure.

A read brings many small messages at once, and an iteration reads from hundreds of connections. Without a limit for all
of them, 600 connections with 32 requests each keep every other client waiting for 0.8 s. Messages that take long (a
thousand bytes of JSON can take 2 ms) use an iteration up by their time.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Messages in an iteration: about 2 ms. When these are used up, each connection that is read handles its least number.
ITERATION_MESSAGE_COUNT = 64

#: How many messages of a connection that waits are handled before those of the next one.
_AT_A_TIME = 4

#: How long messages may be decoded in an iteration, in nanoseconds; most are recognised, and need not be.
ITERATION_NS = 2_000_000


class MessageBudget:
    """The budget of all connections of a front door, and those that wait with messages for the next iteration."""

    __slots__ = ("_in_next_iteration", "_least", "_most", "_scheduled", "_spent_ns", "_used", "_waiting", "room")

    def __init__(self, least: int, most: int, in_next_iteration: Callable[[Callable[[], None]], object]) -> None:
        """A connection handles `least` to `most` messages of one read, before it waits."""
        self._least = least
        self._most = most
        self._in_next_iteration = in_next_iteration
        #: How many messages a connection may handle now; with 0 it waits. It counts them, except for a single one,
        #: which costs nothing.
        self.room = most
        self._used = self._spent_ns = 0
        self._scheduled = False
        #: What handles the next messages of each connection that waits, and calls `wait` again if it has more.
        self._waiting: deque[Callable[[], None]] = deque()

    def handled(self, count: int) -> None:
        """Count messages that a connection has handled."""
        self._used += count
        left = ITERATION_MESSAGE_COUNT - self._used
        if left < self._most and self._spent_ns < ITERATION_NS:
            self.room = max(self._least, left)
        self._schedule()

    def spent(self, took_ns: int) -> None:
        """Count the time that it took to decode a message."""
        self._spent_ns += took_ns
        if self._spent_ns >= ITERATION_NS:
            self.room = 0
        self._schedule()

    def wait(self, handle: Callable[[], None]) -> None:
        """Call `handle` in a later iteration, after all that wait already."""
        self._waiting.append(handle)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._in_next_iteration(self._begin_iteration)

    def _begin_iteration(self) -> None:
        self._scheduled = False
        self._used = self._spent_ns = 0
        waiting = self._waiting
        while waiting and (left := ITERATION_MESSAGE_COUNT - self._used) > 0 and self._spent_ns < ITERATION_NS:
            self.room = min(_AT_A_TIME, left)
            waiting.popleft()()
            if left == ITERATION_MESSAGE_COUNT - self._used:  # a single message, or none
                self._used += 1
        self.room = self._most if self._spent_ns < ITERATION_NS else 0
        if self._used:
            self.handled(0)
