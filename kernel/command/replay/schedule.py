"""When each recorded request is sent again: at its time, in its sequence, and not too many at once. Pure."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class DueRequest(msgspec.Struct, frozen=True):
    """When a request is due, in nanoseconds from the beginning, and the sequence that it belongs to."""

    due_ns: int
    sequence: Hashable = None


def due_times(at_ns: Sequence[int], speed: float, longest_pause_ns: int) -> list[int]:
    """Return when requests are due that the server received at these times, in their order.

    `speed` 2 takes half of the time, 0 sends without pauses. No pause is longer than `longest_pause_ns`: between two
    requests may be the night, or days without a server.
    """
    if not speed or not at_ns:
        return [0] * len(at_ns)
    due, found = 0.0, []
    before_ns = at_ns[0]
    for each_ns in at_ns:
        due += min((each_ns - before_ns) / speed, longest_pause_ns)
        before_ns = each_ns
        found.append(round(due))
    return found


class ReplaySchedule:
    """Says which request is next. Requests of a sequence wait for one another, so that they keep their order."""

    def __init__(self, requests: Sequence[DueRequest], concurrency: int) -> None:
        """`requests` are in the order of their times. At most `concurrency` are in flight."""
        self._requests = requests
        self._concurrency = concurrency
        #: The next one that was not looked at.
        self._next = 0
        self._running = 0
        #: Sequences with a request in flight, and which of their requests wait for it.
        self._sequences: dict[Hashable, deque[int]] = {}
        #: Requests whose sequences have become free.
        self._freed: deque[int] = deque()
        #: The most nanoseconds that a request was started after its time.
        self.latest_ns = 0

    @property
    def ended_all(self) -> bool:
        """Whether every request was taken and has ended."""
        return self._next == len(self._requests) and not self._running and not self._freed

    def take(self, now_ns: int) -> int | None:
        """Return the index of a request to be sent now; None if there is none."""
        if self._running >= self._concurrency:
            return None
        if self._freed:
            return self._started(self._freed.popleft(), now_ns)
        while self._next < len(self._requests) and self._requests[self._next].due_ns <= now_ns:
            index, self._next = self._next, self._next + 1
            sequence = self._requests[index].sequence
            if sequence is not None:
                if sequence in self._sequences:
                    self._sequences[sequence].append(index)
                    continue
                self._sequences[sequence] = deque()
            return self._started(index, now_ns)
        return None

    def _started(self, index: int, now_ns: int) -> int:
        self._running += 1
        self.latest_ns = max(self.latest_ns, now_ns - self._requests[index].due_ns)
        return index

    def ended(self, index: int) -> None:
        """The request has its last response, or could not be sent."""
        self._running -= 1
        sequence = self._requests[index].sequence
        if sequence is None:
            return
        waiting = self._sequences[sequence]
        if waiting:
            self._freed.append(waiting.popleft())
        else:
            del self._sequences[sequence]

    def next_due_ns(self) -> int | None:
        """Return when the next request is due; None if nothing can be sent before another request has ended."""
        if self._running >= self._concurrency or self._next == len(self._requests):
            return None
        return self._requests[self._next].due_ns
