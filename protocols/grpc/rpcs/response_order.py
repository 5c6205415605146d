"""In which order the replies of a stream are sent: that of the requests, except for decoupled models. Pure.

Replies of a request that is not the oldest are kept until those before it have had their final one.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Key = TypeVar("Key")
Reply = TypeVar("Reply")


class RequestOrder(Generic[Key, Reply]):
    """Puts replies into the order in which their requests began.

    Every request that begins gets any number of replies, of which the last one is final. What `put`
    returns is to be sent at once, in that order.
    """

    def __init__(self) -> None:
        #: The requests that have had no final reply sent, oldest first, and the replies kept for each.
        self._waiting: deque[Key] = deque()
        self._kept: dict[Key, list[tuple[Reply, bool]]] = {}

    def begin(self, request: Key) -> None:
        """Take a place behind all requests that have begun."""
        assert request not in self._kept, "a request begins once"
        self._waiting.append(request)
        self._kept[request] = []

    def put(self, request: Key, reply: Reply, *, final: bool) -> list[Reply]:
        """Add a reply and return all that are due now."""
        if self._waiting[0] != request:
            self._kept[request].append((reply, final))
            return []
        due = [reply]
        if final:
            self._waiting.popleft()
            del self._kept[request]
            if self._waiting:
                due += self._now_due()
        return due

    def _now_due(self) -> list[Reply]:
        """Take what was kept for those that are the oldest now."""
        due: list[Reply] = []
        while self._waiting:
            oldest = self._waiting[0]
            kept, self._kept[oldest] = self._kept[oldest], []
            due += [found for found, _ in kept]
            if not (kept and kept[-1][1]):
                break
            self._waiting.popleft()
            del self._kept[oldest]
        return due

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self._waiting) == len(self._kept), "a request waits twice"
        assert set(self._waiting) == set(self._kept), "replies are kept for a request that does not wait"
        if self._waiting:
            assert not self._kept[self._waiting[0]], "the oldest request's replies were not sent"
        for kept in self._kept.values():
            assert not any(final for _, final in kept[:-1]), "a reply came after the final one"
