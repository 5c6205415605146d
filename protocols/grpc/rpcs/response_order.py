"""In which order the responses of a stream are sent: in that of the requests, except for decoupled models. Pure.

Responses to a request that is not the oldest are kept until the older requests have got their final responses.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Key = TypeVar("Key")
Sent = TypeVar("Sent")


class RequestOrder(Generic[Key, Sent]):
    """Puts responses into the order in which their requests began.

    Every request that begins gets any number of responses, of which the last one is final. What `put` returns is to
    be sent at once, in that order.
    """

    def __init__(self) -> None:
        #: The requests whose final response was not sent, oldest first, and the responses kept for each.
        self._waiting: deque[Key] = deque()
        self._kept: dict[Key, list[tuple[Sent, bool]]] = {}

    def begin(self, request: Key) -> None:
        """Put `request` behind all requests that have begun."""
        assert request not in self._kept, "a request begins once"
        self._waiting.append(request)
        self._kept[request] = []

    def put(self, request: Key, response: Sent, *, final: bool) -> list[Sent]:
        """Add a response and return all that are to be sent now."""
        if self._waiting[0] != request:
            self._kept[request].append((response, final))
            return []
        due = [response]
        if final:
            self._waiting.popleft()
            del self._kept[request]
            if self._waiting:
                due += self._now_due()
        return due

    def _now_due(self) -> list[Sent]:
        """Take what was kept for the requests that are now the oldest."""
        due: list[Sent] = []
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
        assert set(self._waiting) == set(self._kept), "responses are kept for a request that does not wait"
        if self._waiting:
            assert not self._kept[self._waiting[0]], "the oldest request's responses were not sent"
        for kept in self._kept.values():
            assert not any(final for _, final in kept[:-1]), "a response was put after the final one"
