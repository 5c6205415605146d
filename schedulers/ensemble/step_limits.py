"""The most requests that each step of an ensemble executes at the same time (`max_inflight_requests`). Pure.

The limit counts the requests of all requests to the ensemble, as in Triton. Calls above it wait in order. While they
wait, the decoupled steps that made their inputs get no credit for them, so that these steps stop as well.
"""

from __future__ import annotations

from collections import OrderedDict
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
        #: By step: waiting calls, the oldest first, and since when. A client that disconnects may remove thousands from
        #: the middle. A plain dict would have to be searched for its first entry behind those that were removed.
        self._waiting: list[OrderedDict[Call, int]] = [OrderedDict() for _ in range(step_count)]

    def start(self, step: int, call: Call, now_ns: int) -> bool:
        """Whether `call` may start now. Otherwise it waits, and `ended` or `overdue` returns it."""
        if self._running[step] < self._limit:
            self._running[step] += 1
            return True
        self._waiting[step][call] = now_ns
        return False

    def ended(self, step: int) -> Call | None:
        """A running call has ended. Returns the waiting call that starts instead, if there is one."""
        self._running[step] -= 1
        waiting = self._waiting[step]
        if not waiting or self._running[step] >= self._limit:
            return None
        self._running[step] += 1
        return waiting.popitem(last=False)[0]

    def remove(self, step: int, call: Call) -> bool:
        """Remove a call that waits. Returns whether it did."""
        return self._waiting[step].pop(call, None) is not None

    def overdue(self, now_ns: int, most: int) -> list[tuple[int, Call]]:
        """Return `most` of the calls, after their steps, that have waited too long. They start now."""
        found: list[tuple[int, Call]] = []
        for step, waiting in enumerate(self._waiting):
            while len(found) < most and waiting and now_ns - next(iter(waiting.values())) >= LONGEST_WAIT_NS:
                found.append((step, waiting.popitem(last=False)[0]))
                self._running[step] += 1
        return found

    @property
    def until_ns(self) -> int | None:
        """When `overdue` returns the next call, or None."""
        first = [next(iter(waiting.values())) for waiting in self._waiting if waiting]
        return min(first) + LONGEST_WAIT_NS if first else None

    def check(self) -> None:
        """Recompute the invariants."""
        for running, waiting in zip(self._running, self._waiting, strict=True):
            assert running >= 0
            assert not waiting or running >= self._limit
