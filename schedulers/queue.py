"""Queued requests: priority levels, timeouts and size limits (Triton's `PolicyQueue`). Pure.

Times are monotonic nanoseconds from the caller. Levels are served strictly in order, level 1 first. Within a level,
requests are served in the order of arrival, or clients get shares (`schedulers/fair.py`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from schedulers.fair import FairOrder

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from kernel.config.fair_queuing import FairQueuing
    from kernel.config.spec import DynamicBatching, QueuePolicy
    from kernel.serving.request import Request


#: How many entries are looked at for each request that is cancelled. Two entries would find as many cancelled ones as
#: there come; with four, they are at most half as many as the others.
_SWEPT_AT_ONCE = 4


class Waiting(msgspec.Struct, gc=False):
    """A request in the queue."""

    request: Request
    #: Requests with different keys cannot share a batch (`schedulers/shapes.py`).
    key: Hashable
    #: When the queue policy rejects or delays the request, or None.
    expires_ns: int | None


class _Level:
    """One priority level: requests before their timeout, then expired ones that the policy DELAY keeps."""

    def __init__(self, policy: QueuePolicy, fair: FairQueuing | None) -> None:
        self.policy = policy
        self.in_time: deque[Waiting] | FairOrder = deque() if fair is None else FairOrder(fair)
        self.delayed: deque[Waiting] | FairOrder = deque() if fair is None else FairOrder(fair)
        #: All entries, in the order in which they are served: of `in_time` and `delayed`, each after those of it that
        #: `sweep` has looked at.
        self.orders: tuple[deque[Waiting] | FairOrder, ...] = (self.in_time, self.delayed)
        #: How many of the entries were cancelled. Only a `deque` keeps them, until they are first, or swept.
        self.cancelled = 0

    def __len__(self) -> int:
        return sum(map(len, self.orders)) - self.cancelled

    def sweep(self, cancelled: set[Request]) -> None:
        """Look at the next entries, and remove those whose requests are `cancelled`, also from that.

        One after the other, because to look at all entries at once would take long. Not for shares of clients.
        """
        if len(self.orders) == 2:
            self.orders = (deque(), self.in_time, deque(), self.delayed)
        swept_in_time, in_time, swept_delayed, delayed = self.orders
        for _ in range(_SWEPT_AT_ONCE):
            old, new = (in_time, swept_in_time) if in_time else (delayed, swept_delayed)
            if not old:
                break
            entry = old.popleft()
            if entry.request in cancelled:
                cancelled.remove(entry.request)
                self.cancelled -= 1
            else:
                new.append(entry)
        if not in_time and not delayed:  # the next sweep begins with the first entry
            self.in_time, self.delayed = self.orders = (swept_in_time, swept_delayed)

    def sweep_all(self, cancelled: set[Request]) -> None:
        """End a sweep that has begun, and remove the entries of all `cancelled` requests of the level."""
        while self.cancelled or len(self.orders) > 2:
            self.sweep(cancelled)


class RequestQueue:
    """The queue of one model with a dynamic batcher."""

    def __init__(self, settings: DynamicBatching, fair: FairQueuing | None = None) -> None:
        self._settings = settings
        self._fair = fair
        self._levels: dict[int, _Level] = {}
        #: Requests that were cancelled and are still entries of a level. To remove them at once would take a search.
        self._cancelled: set[Request] = set()
        #: The number of queued requests.
        self.count = 0
        #: When the next request may expire, or None. Not later than the earliest expiry.
        self.next_expiry_ns: int | None = None

    def in_order(self) -> Iterable[Waiting]:
        """Return the requests in the order in which they are served; valid until the queue changes."""
        cancelled = self._cancelled
        if len(self._levels) == 1 and not cancelled:  # the usual case; runs for each batch
            [level] = self._levels.values()
            if not level.delayed and len(level.orders) == 2:
                return level.in_time
        entries = (entry for _, level in sorted(self._levels.items()) for entries in level.orders for entry in entries)
        return (entry for entry in entries if entry.request not in cancelled) if cancelled else entries

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
        level.orders[0].appendleft(Waiting(request, key, expires_ns))
        self.count += 1
        if expires_ns is not None:
            self._note_expiry(expires_ns)

    def cancel(self, request: Request) -> bool:
        """Remove a request, which the caller fails.

        Returns False if it is not queued: it was dispatched, or has its final response.
        """
        if request.dispatched or request.finished or request in self._cancelled:
            return False
        level = self._level_of(request)
        if self._fair is not None:
            orders = (level.in_time, level.delayed)
            found = any(isinstance(entries, FairOrder) and entries.discard(request) for entries in orders)
            self.count -= found
            return found
        self.count -= 1
        level.sweep(self._cancelled)
        level.cancelled += 1
        self._cancelled.add(request)
        return True

    def take(self, count: int) -> list[Request]:
        """Remove and return the first `count` requests."""
        taken: list[Request] = []
        cancelled = self._cancelled
        for _, level in sorted(self._levels.items()) if len(self._levels) > 1 else self._levels.items():
            for entries in level.orders:
                while len(taken) < count and entries:
                    request = entries.popleft().request
                    if cancelled and request in cancelled:
                        cancelled.remove(request)
                        level.cancelled -= 1
                    else:
                        taken.append(request)
        self.count -= len(taken)
        return taken

    def expire(self, now_ns: int) -> list[Request]:
        """Apply timeouts. Removes and returns the requests to reject; with policy DELAY they go behind the others."""
        if self.next_expiry_ns is None or now_ns < self.next_expiry_ns:
            return []
        if self._fair is None:
            for level in self._levels.values():
                level.sweep_all(self._cancelled)
        rejected: list[Request] = []
        self.next_expiry_ns = None
        for _, level in sorted(self._levels.items()):
            expired: list[Waiting] = []
            for entry in level.in_time:
                if entry.expires_ns is None:
                    continue
                if now_ns < entry.expires_ns:
                    self._note_expiry(entry.expires_ns)
                else:
                    expired.append(entry)
            if not expired:
                continue
            _remove(level, expired)
            if level.policy.delay_on_timeout:
                for entry in expired:
                    level.delayed.append(entry)
            else:
                rejected += [entry.request for entry in expired]
        self.count -= len(rejected)
        return rejected

    def check(self) -> None:
        """Recompute the invariants."""
        entries = list(self.in_order())
        requests = [id(entry.request) for entry in entries]
        assert len(requests) == len(set(requests)) == self.count
        assert sum(map(len, self._levels.values())) == self.count
        assert sum(level.cancelled for level in self._levels.values()) == len(self._cancelled)
        expiries = [e.expires_ns for level in self._levels.values() for e in level.in_time if e.expires_ns is not None]
        assert self.next_expiry_ns is None or not expiries or self.next_expiry_ns <= min(expiries)
        assert self.next_expiry_ns is not None or not expiries
        for level in self._levels.values():
            assert any(level.in_time is order for order in level.orders)
            for order in level.orders:
                if isinstance(order, FairOrder):
                    order.check()

    def _level_of(self, request: Request) -> _Level:
        settings = self._settings
        number = request.priority
        if not 0 < number <= settings.priority_levels:
            number = settings.default_priority_level
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level(settings.queue_policy(number), self._fair)
        return level

    def _note_expiry(self, expires_ns: int) -> None:
        if self.next_expiry_ns is None or expires_ns < self.next_expiry_ns:
            self.next_expiry_ns = expires_ns


def _remove(level: _Level, expired: list[Waiting]) -> None:
    """Remove entries from those that are in time."""
    entries = level.in_time
    if isinstance(entries, FairOrder):
        for entry in expired:
            entries.discard(entry.request)
        return
    gone = {id(entry) for entry in expired}
    kept = [entry for entry in entries if id(entry) not in gone]
    entries.clear()
    entries.extend(kept)


def _expiry(request: Request, policy: QueuePolicy) -> int | None:
    """Return when a request expires. Its own timeout applies if the policy allows it and has a longer one (Triton)."""
    timeout_ns = policy.default_timeout_ns
    if policy.allow_timeout_override and 0 < request.timeout_us * 1000 < timeout_ns:
        timeout_ns = request.timeout_us * 1000
    return request.queue_start_ns + timeout_ns if timeout_ns else None
