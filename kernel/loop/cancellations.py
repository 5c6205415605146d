"""Cancels the requests of clients that have left: all soon, but only some in one event-loop iteration.

A client can leave a hundred thousand requests behind at once. To cancel one takes the kernel 3 to 100 µs: the scheduler
gets an event, the request its final response, and an ensemble cancels steps and starts those of others. Meanwhile other
clients are served. What is dispatched before its turn comes is cancelled like any request that an instance executes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from kernel.loop.clock import ITERATION_END

if TYPE_CHECKING:
    from kernel.loop.clock import Alarm, Clock

#: Requests that are cancelled at once in an iteration: the requests of usual clients.
MOST_AT_ONCE = 32

#: How many of those that wait are cancelled in an iteration, and for how long, in nanoseconds.
MOST_WAITING = 256
_LONGEST_NS = 1_000_000


class Cancellable(Protocol):
    """Implemented by `kernel.serving.request.Request`."""

    def cancel(self) -> None:
        """Cancel what is not finished and was not cancelled before."""


class Cancellations:
    """The cancelled requests of all front doors that wait for their turn, the oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[Cancellable] = deque()
        #: How many more requests are cancelled at once in this iteration.
        self._room = MOST_AT_ONCE
        #: Rings at the end of an iteration with a cancellation; made when it is first needed.
        self._alarm: Alarm | None = None

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def add(self, *requests: Cancellable) -> None:
        """Cancel `requests` in this and later iterations, the first one first."""
        self._waiting.extend(requests)
        while self._room > 0 and self._waiting:
            self._room -= 1
            self._waiting.popleft().cancel()
        self._continue_later()

    def _continue_later(self) -> None:
        if self._alarm is None:
            self._alarm = self._clock.alarm(self._continue)
        self._alarm.set(ITERATION_END)

    def _continue(self) -> None:
        """Cancel some of the requests that wait."""
        waiting, now_ns = self._waiting, self._clock.now_ns
        self._room = 0 if waiting else MOST_AT_ONCE
        until_ns = now_ns() + _LONGEST_NS
        for _ in range(MOST_WAITING):
            if not waiting or now_ns() >= until_ns:
                break
            waiting.popleft().cancel()
        if waiting or not self._room:
            self._continue_later()
