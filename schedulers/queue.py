"""Queued requests: priority levels, timeouts and size limits (Triton's `PolicyQueue`). Pure.

Times are monotonic nanoseconds from the caller. Levels are served strictly in order, level 1 first.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from kernel.config.spec import DynamicBatching, QueuePolicy
    from kernel.serving.request import Request


class Waiting(msgspec.Struct, gc=False):
    """A request in the queue."""

    request: Request
    #: Requests with different keys cannot share a batch (`schedulers/shapes.py`).
    key: Hashable
    #: When the queue policy rejects or delays the request, or None.
    expires_ns: int | None


class _Level:
    """One priority level: requests before their timeout, then expired ones that the policy DELAY keeps."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.in_time: deque[Waiting] = deque()
        self.delayed: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self.in_time) + len(self.delayed)


class RequestQueue:
    """The queue of one model with a dynamic batcher."""

    def __init__(self, settings: DynamicBatching) -> None:
        self._settings = settings
        self._levels: dict[int, _Level] = {}
        #: The number of queued requests.
        self.count = 0
        #: When the next request may expire, or None. Not later than the earliest expiry.
        self.next_expiry_ns: int | None = None

    def in_order(self) -> Iterable[Waiting]:
        """Return the requests in the order in which they are served; valid until the queue changes."""
        if len(self._levels) == 1:  # the usual case; runs for each batch
            [level] = self._levels.values()
            if not level.delayed:
                return level.in_time
        levels = (level for _, level in sorted(self._levels.items()))
        return (entry for level in levels for entries in (level.in_time, level.delayed) for entry in entries)

    def add(self, request: Request, key: Hashable) -> bool:
        """Queue a request; returns False if its level is full."""
        level = self._level_of(request)
        limit = level.policy.max_queue_size
        if limit and len(level) >= limit:
            return False
        expires_ns = _expiry(request, level.policy) if level.policy.default_timeout_ns else None
        level.in_time.append(Waiting(request, key, expires_ns))
        self.count += 1
        if expires_ns is not None:
            self._note_expiry(expires_ns)
        return True

    def put_back(self, request: Request, key: Hashable) -> None:
        """Queue a request again that was taken before, at the front of its level. Size limits do not apply."""
        level = self._level_of(request)
        expires_ns = _expiry(request, level.policy)
        level.in_time.appendleft(Waiting(request, key, expires_ns))
        self.count += 1
        if expires_ns is not None:
            self._note_expiry(expires_ns)

    def cancel(self, request: Request) -> bool:
        """Remove a request; returns False if it is not in the queue."""
        for level in self._levels.values():
            for entries in (level.in_time, level.delayed):
                for entry in entries:
                    if entry.request is request:
                        entries.remove(entry)
                        self.count -= 1
                        return True
        return False

    def take(self, count: int) -> list[Request]:
        """Remove and return the first `count` requests."""
        taken: list[Request] = []
        for _, level in sorted(self._levels.items()):
            for entries in (level.in_time, level.delayed):
                while entries and len(taken) < count:
                    taken.append(entries.popleft().request)
        self.count -= len(taken)
        return taken

    def expire(self, now_ns: int) -> list[Request]:
        """Apply timeouts. Removes and returns the requests to reject; with policy DELAY they go behind the others."""
        if self.next_expiry_ns is None or now_ns < self.next_expiry_ns:
            return []
        rejected: list[Request] = []
        self.next_expiry_ns = None
        for _, level in sorted(self._levels.items()):
            in_time: deque[Waiting] = deque()
            for entry in level.in_time:
                if entry.expires_ns is None or now_ns < entry.expires_ns:
                    in_time.append(entry)
                    if entry.expires_ns is not None:
                        self._note_expiry(entry.expires_ns)
                elif level.policy.delay_on_timeout:
                    level.delayed.append(entry)
                else:
                    rejected.append(entry.request)
            level.in_time = in_time
        self.count -= len(rejected)
        return rejected

    def check(self) -> None:
        """Recompute the invariants."""
        requests = [id(entry.request) for entry in self.in_order()]
        assert len(requests) == len(set(requests)) == self.count
        expiries = [e.expires_ns for level in self._levels.values() for e in level.in_time if e.expires_ns is not None]
        assert self.next_expiry_ns is None or not expiries or self.next_expiry_ns <= min(expiries)
        assert self.next_expiry_ns is not None or not expiries

    def _level_of(self, request: Request) -> _Level:
        settings = self._settings
        number = request.priority
        if not 0 < number <= settings.priority_levels:
            number = settings.default_priority_level
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level(settings.queue_policy(number))
        return level

    def _note_expiry(self, expires_ns: int) -> None:
        if self.next_expiry_ns is None or expires_ns < self.next_expiry_ns:
            self.next_expiry_ns = expires_ns


def _expiry(request: Request, policy: QueuePolicy) -> int | None:
    """Return when a request expires. Its own timeout applies if the policy allows it and has a longer one (Triton)."""
    timeout_ns = policy.default_timeout_ns
    if policy.allow_timeout_override and 0 < request.timeout_us * 1000 < timeout_ns:
        timeout_ns = request.timeout_us * 1000
    return request.queue_start_ns + timeout_ns if timeout_ns else None
