"""Queued requests: priority levels, timeouts and size limits (Triton's `PolicyQueue`). Pure.

Times are monotonic nanoseconds from the caller. Levels are served strictly in order, level 1 first. Within a level,
requests are served in the order of arrival, or clients get shares (`schedulers/fair.py`).
"""

from __future__ import annotations

import heapq
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

#: How many requests expire at once: thousands can come together.
EXPIRED_AT_ONCE = 256

#: How many expiries of entries that are gone are kept beside as many as requests are queued.
_GONE_KEPT = 256


class Waiting(msgspec.Struct, gc=False):
    """A request in the queue."""

    request: Request
    #: Requests with different keys cannot share a batch (`schedulers/dynamic_batcher.py`).
    key: Hashable
    #: When the queue policy rejects or delays the request, or None.
    expires_ns: int | None
    #: Whether it was taken, cancelled, rejected or delayed: where it is still an entry, it is passed over. Of entries
    #: that were taken it is only known where they might expire.
    gone: bool = False


class _Level:
    """One priority level: requests before their timeout, then expired ones that the policy DELAY keeps."""

    def __init__(self, policy: QueuePolicy, fair: FairQueuing | None) -> None:
        self.policy = policy
        self.in_time: deque[Waiting] | FairOrder = deque() if fair is None else FairOrder(fair)
        self.delayed: deque[Waiting] | FairOrder = deque() if fair is None else FairOrder(fair)
        #: All entries, in the order in which they are served: of `in_time` and `delayed`, each after those of it that
        #: `sweep` has looked at.
        self.orders: tuple[deque[Waiting] | FairOrder, ...] = (self.in_time, self.delayed)
        #: How many of the entries are not served: they were cancelled or have expired. Only a `deque` keeps them, until
        #: they are first, or swept.
        self.cancelled = 0

    def __len__(self) -> int:
        return sum(map(len, self.orders)) - self.cancelled

    def sweep(self, cancelled: set[Request]) -> None:
        """Look at the next entries, and remove those that are gone or whose requests are `cancelled`, also from that.

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
            if entry.gone:
                self.cancelled -= 1
            elif entry.request in cancelled:
                cancelled.remove(entry.request)
                entry.gone = True
                self.cancelled -= 1
            else:
                new.append(entry)
        if not in_time and not delayed:  # the next sweep begins with the first entry
            self.in_time, self.delayed = self.orders = (swept_in_time, swept_delayed)


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
        #: The entries that may expire: a heap of time, a number that orders those of one time as they are served, the
        #: entry and its level. Entries that are gone or cancelled leave it when they are first, or all together.
        self._expiries: list[tuple[int, int, Waiting, _Level]] = []
        self._last_number = self._first_number = 0

    def in_order(self) -> Iterable[Waiting]:
        """Return the requests in the order in which they are served; valid until the queue changes."""
        cancelled = self._cancelled
        if len(self._levels) == 1:  # the usual case; runs for each batch
            [level] = self._levels.values()
            if not level.cancelled and not level.delayed and len(level.orders) == 2:
                return level.in_time
        entries = (entry for _, level in sorted(self._levels.items()) for entries in level.orders for entry in entries)
        if not any(level.cancelled for level in self._levels.values()):
            return entries
        return (entry for entry in entries if not entry.gone and entry.request not in cancelled)

    def add(self, request: Request, key: Hashable) -> bool:
        """Queue a request; returns False if its level is full."""
        level = self._level_of(request)
        limit = level.policy.max_queue_size
        if limit and len(level) >= limit:
            return False
        expires_ns = _expiry(request, level.policy) if level.policy.default_timeout_ns else None
        level.in_time.append(entry := Waiting(request, key, expires_ns))
        self.count += 1
        if expires_ns is not None:
            self._last_number += 1
            self._note_expiry(expires_ns, self._last_number, entry, level)
        return True

    def put_back(self, request: Request, key: Hashable) -> None:
        """Queue a request again that was taken before, at the front of its level. Size limits do not apply."""
        level = self._level_of(request)
        expires_ns = _expiry(request, level.policy)
        level.orders[0].appendleft(entry := Waiting(request, key, expires_ns))
        self.count += 1
        if expires_ns is not None:
            self._first_number -= 1
            self._note_expiry(expires_ns, self._first_number, entry, level)

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
            if self._expiries:
                self._drop_many_expiries()
            return found
        self.count -= 1
        level.sweep(self._cancelled)
        level.cancelled += 1
        self._cancelled.add(request)
        if self._expiries:
            self._drop_many_expiries()
        return True

    def take(self, count: int) -> list[Request]:
        """Remove and return the first `count` requests."""
        taken: list[Request] = []
        cancelled = self._cancelled
        for _, level in sorted(self._levels.items()) if len(self._levels) > 1 else self._levels.items():
            for entries in level.orders:
                while len(taken) < count and entries:
                    entry = entries.popleft()
                    request = entry.request
                    if entry.gone:
                        level.cancelled -= 1
                    elif cancelled and request in cancelled:
                        cancelled.remove(request)
                        entry.gone = True
                        level.cancelled -= 1
                    else:
                        taken.append(request)
                        if entry.expires_ns is not None:
                            entry.gone = True
        self.count -= len(taken)
        if self._expiries:
            self._drop_expiries()
        return taken

    def expire(self, now_ns: int) -> list[Request]:
        """Apply timeouts, of `EXPIRED_AT_ONCE` requests at most: `next_expiry_ns` has passed if there are more.

        Removes and returns the requests to reject; with policy DELAY they go behind the others.
        """
        if self.next_expiry_ns is None or now_ns < self.next_expiry_ns:
            return []
        rejected: list[Request] = []
        expiries = self._expiries
        for _ in range(EXPIRED_AT_ONCE):
            self._drop_expiries()
            if not expiries or now_ns < expiries[0][0]:
                break
            _, _, entry, level = heapq.heappop(expiries)
            self._leave(entry, level)
            if level.policy.delay_on_timeout:
                level.delayed.append(Waiting(entry.request, entry.key, None))
            else:
                rejected.append(entry.request)
                self.count -= 1
        self._drop_expiries()
        return rejected

    def _leave(self, entry: Waiting, level: _Level) -> None:
        """An entry that is in time has expired: it is served no more."""
        entry.gone = True
        if isinstance(level.in_time, FairOrder):
            level.in_time.discard(entry.request)
        else:
            level.cancelled += 1
            level.sweep(self._cancelled)

    def _drop_expiries(self) -> None:
        """Drop what need not expire any more from the front, and note when the next request expires."""
        expiries, cancelled = self._expiries, self._cancelled
        while expiries and (expiries[0][2].gone or expiries[0][2].request in cancelled):
            heapq.heappop(expiries)
        self.next_expiry_ns = expiries[0][0] if expiries else None

    def check(self) -> None:
        """Recompute the invariants."""
        entries = list(self.in_order())
        requests = [id(entry.request) for entry in entries]
        assert len(requests) == len(set(requests)) == self.count
        assert sum(map(len, self._levels.values())) == self.count
        kept = [e for level in self._levels.values() for order in level.orders for e in order]
        assert self._cancelled <= {entry.request for entry in kept if not entry.gone}
        assert sum(level.cancelled for level in self._levels.values()) == len(kept) - len(entries)
        assert len(self._expiries) <= 2 * len(entries) + 2 * _GONE_KEPT, "expiries of requests that are gone are kept"
        expiries = [entry.expires_ns for entry in entries if entry.expires_ns is not None]
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

    def _note_expiry(self, expires_ns: int, number: int, entry: Waiting, level: _Level) -> None:
        expiries = self._expiries
        heapq.heappush(expiries, (expires_ns, number, entry, level))
        self.next_expiry_ns = expiries[0][0]
        self._drop_many_expiries()

    def _drop_many_expiries(self) -> None:
        """Drop all expiries that are not needed if they are many: they refer to requests."""
        expiries = self._expiries
        if len(expiries) > 2 * self.count + _GONE_KEPT:
            cancelled = self._cancelled
            expiries[:] = [each for each in expiries if not each[2].gone and each[2].request not in cancelled]
            heapq.heapify(expiries)


def _expiry(request: Request, policy: QueuePolicy) -> int | None:
    """Return when a request expires. Its own timeout applies if the policy allows it and has a longer one (Triton)."""
    timeout_ns = policy.default_timeout_ns
    if policy.allow_timeout_override and 0 < request.timeout_us * 1000 < timeout_ns:
        timeout_ns = request.timeout_us * 1000
    return request.queue_start_ns + timeout_ns if timeout_ns else None
