"""The most requests that each step of an ensemble executes at the same time (`max_inflight_requests`). Pure.

The limit counts the requests of all requests to the ensemble, as in Triton. Calls above it wait in order. While they
wait, the decoupled steps that made their inputs get no credit for them, so that these steps stop as well.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

#: A call that has waited so long starts in any case, as in Triton: a model that has not responded for that long may be
#: one that waits for another response of this ensemble.
LONGEST_WAIT_NS = 300_000_000_000

Call = TypeVar("Call")


class StepLimits(Generic[Call]):
    """Counts the running calls of each step. `limit` is at least 1."""

    def __init__(self, limit: int, step_count: int) -> None:
        self._limit = limit
        self._running = [0] * step_count
        #: By step: waiting calls, and since when.
        self._waiting: list[deque[tuple[Call, int]]] = [deque() for _ in range(step_count)]

    def start(self, step: int, call: Call, now_ns: int) -> bool:
        """Whether `call` may start now. Otherwise it waits, and `ended` or `overdue` returns it."""
        if self._running[step] < self._limit:
            self._running[step] += 1
            return True
        self._waiting[step].append((call, now_ns))
        return False

    def ended(self, step: int) -> Call | None:
        """A running call has ended. Returns the waiting call that starts instead, if there is one."""
        self._running[step] -= 1
        waiting = self._waiting[step]
        if not waiting or self._running[step] >= self._limit:
            return None
        self._running[step] += 1
        return waiting.popleft()[0]

    def remove(self, step: int, call: Call) -> bool:
        """Remove a call that waits. Returns whether it did."""
        waiting = self._waiting[step]
        for entry in waiting:
            if entry[0] is call:
                waiting.remove(entry)
                return True
        return False

    def overdue(self, now_ns: int) -> list[tuple[int, Call]]:
        """Return the calls, after their steps, that have waited too long. They start now."""
        found: list[tuple[int, Call]] = []
        for step, waiting in enumerate(self._waiting):
            while waiting and now_ns - waiting[0][1] >= LONGEST_WAIT_NS:
                found.append((step, waiting.popleft()[0]))
                self._running[step] += 1
        return found

    @property
    def until_ns(self) -> int | None:
        """When `overdue` returns the next call, or None."""
        first = [waiting[0][1] for waiting in self._waiting if waiting]
        return min(first) + LONGEST_WAIT_NS if first else None

    def check(self) -> None:
        """Recompute the invariants."""
        for running, waiting in zip(self._running, self._waiting, strict=True):
            assert running >= 0
            assert not waiting or running >= self._limit
