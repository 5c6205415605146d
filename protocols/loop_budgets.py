"""What a front door may do in one event-loop iteration, so that no client keeps others waiting. Pure.

- `IterationBudget`: bytes of large messages, in both directions. A socket takes and gives megabytes at once, for as
  long as its peer keeps up, and the first access to a page of shared memory takes long. Without a limit, clients of
  large messages block an iteration for tens of milliseconds each.
- `MessageBudget`: small messages, and the connections that wait. A read brings many of them at once, and an iteration
  reads from hundreds of connections. Without a limit for all of them, 600 connections with 32 requests each keep every
  other client waiting for 0.8 s. Messages that take long (a thousand bytes of JSON can take 2 ms) use an iteration up
  by their time.
- `LoopBudget`: time for messages of medium size. The way to a helper and back takes the loop some 0.2 ms, and twice as
  long with a large message: that is longer than to decode a thousand numbers. So a message goes to a helper because of
  the time that it takes, and not because of its size.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes in an iteration: about 1 ms, and a request waits for two or three iterations. A tensor of 1 MiB leaves in one
#: piece with what is around it. When the bytes are used up, each connection gets a little, and pauses.
ITERATION_BYTE_SIZE = (1 << 20) + (64 << 10)

_LEAST_BYTE_SIZE = 16 << 10

#: A read of this size counts, whatever it is a part of: the socket may have more.
COUNTED_READ_BYTE_SIZE = _LEAST_BYTE_SIZE


class IterationBudget:
    """The budget of all connections of a front door."""

    __slots__ = ("_used",)

    def __init__(self) -> None:
        self._used = 0

    @property
    def room(self) -> int:
        """How many bytes a connection may receive or send now."""
        return max(ITERATION_BYTE_SIZE - self._used, _LEAST_BYTE_SIZE)

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was moved in this iteration: then `reset` must be called at its end."""
        return not self._used

    def moved(self, byte_size: int) -> bool:
        """Count received or sent bytes. Returns whether the connection is to pause until the next iteration."""
        self._used += byte_size
        return self._used >= ITERATION_BYTE_SIZE

    def reset(self) -> None:
        """Another iteration begins."""
        self._used = 0


#: Messages in an iteration: about 2 ms. When these are used up, each connection that is read handles its least number.
ITERATION_MESSAGE_COUNT = 64

#: How many messages of a connection that waits are handled before the next one's.
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


#: Work that takes the loop less time than the way to a helper. It is never sent there.
FREE_US = 150.0

#: Longer work is given to a helper that is idle if there are other requests: it is done at the same time as theirs.
SHARED_US = 500.0

#: The longest piece of work, and all of it in one event-loop iteration, except for what is free.
ITERATION_US = 2000.0

#: All of it in an iteration while no helper has started yet, which takes much longer.
UNAIDED_ITERATION_US = 8000.0


class LoopBudget:
    """The budget of all connections of a front door, in microseconds as they were estimated beforehand."""

    __slots__ = ("_used_us",)

    def __init__(self) -> None:
        self._used_us = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was taken in this iteration: then `reset` must be called at its end once something is."""
        return not self._used_us

    def take(self, cost_us: float, *, unaided: bool = False) -> bool:
        """Return whether work that takes `cost_us` may be done now; it counts then.

        `unaided`: no helper has started.
        """
        if cost_us <= FREE_US:
            return True
        limit_us = UNAIDED_ITERATION_US if unaided else ITERATION_US
        if cost_us > ITERATION_US or self._used_us + cost_us > limit_us:
            return False
        self._used_us += cost_us
        return True

    def reset(self) -> None:
        """Another iteration begins."""
        self._used_us = 0.0
