"""Queued requests: priority levels, timeouts and size limits (Triton's `PolicyQueue`). Pure.

Times are monotonic nanoseconds from the caller. Levels are served strictly in order, level 1 first. Within a level,
requests are served in the order of arrival, or clients get shares.

Shares follow the weights of clients. The rule is start-time fair queuing (Goyal, Vin, Cheng 1996). A client's next
request has a start tag: where its last one ended in virtual time, or the present if it has waited for nothing. A
request of R rows ends R / weight later. The request with the lowest tag is served next, and its tag is the present. So
between two clients that both have requests queued, the rows served, each divided by the weight, never differ by more
than one request of each. A client that was idle gets no extra share later. A cancelled request does not count for its
client.

A quota says how many requests each client of a model may have queued or in flight.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from kernel.config.fair_queuing import FairQueuing
    from kernel.config.spec import DynamicBatching, QueuePolicy
    from kernel.serving.request import Request, RequestOwner
    from kernel.serving.response import Response

#: The most clients without a queued request whose last service is remembered.
MAX_IDLE_CLIENTS = 1000

#: The longest name of a client. Of a longer one the beginning counts: names are few bytes, and memory is limited.
MAX_NAME_LENGTH = 256


class _Client:
    """A client with queued requests, or one that was served a short while ago."""

    __slots__ = ("end", "name", "requests", "ticket", "weight")

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight
        self.requests: OrderedDict[Request, Waiting] = OrderedDict()
        #: Where its last request that was served ended in virtual time.
        self.end = 0.0
        #: The number of its valid entry in the heap.
        self.ticket = 0


def client_of(request: Request, fair: FairQueuing) -> str:
    """Return the name of the client that sent `request`; empty if it has no name."""
    name = request.sink.header(fair.header) if fair.header else str(request.parameters.get(fair.parameter, ""))
    return name[:MAX_NAME_LENGTH]


class FairOrder:
    """Queued requests in the order in which they are served. Has the methods of a `deque` that queues use."""

    def __init__(self, fair: FairQueuing) -> None:
        self._fair = fair
        #: Requests that were taken and came back. They have been charged, and go first.
        self._returned: deque[Waiting] = deque()
        #: Clients with queued requests.
        self._waiting: dict[str, _Client] = {}
        #: Clients without queued requests, the one that was served last at the end.
        self._idle: OrderedDict[str, _Client] = OrderedDict()
        #: A heap of start tag, ticket and client: for each waiting client the tag of its first request. Among equal
        #: tags the lower ticket goes first. An entry is void if its ticket is not the client's, or no request waits.
        self._heap: list[tuple[float, int, _Client]] = []
        #: The present in virtual time.
        self._now = 0.0
        self._tickets = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, entry: Waiting) -> None:
        """Add a request behind the others of its client."""
        name = client_of(entry.request, self._fair)
        client = self._waiting.get(name)
        if client is None:
            client = self._idle.pop(name, None) or _Client(name, self._fair.weight(name))
            self._waiting[name] = client
            self._push(client, max(self._now, client.end))
        client.requests[entry.request] = entry
        self._count += 1

    def appendleft(self, entry: Waiting) -> None:
        """Add a request that was taken before, in front of all others. Its client is not charged again."""
        self._returned.appendleft(entry)
        self._count += 1

    def popleft(self) -> Waiting:
        """Remove and return the request to serve next, and charge its client. Raises IndexError if there is none."""
        if self._returned:
            self._count -= 1
            return self._returned.popleft()
        start, ticket, client = heapq.heappop(self._heap)
        while not (client.requests and client.ticket == ticket):
            start, ticket, client = heapq.heappop(self._heap)
        _, entry = client.requests.popitem(last=False)
        self._count -= 1
        self._now = start
        client.end = start + _cost(entry.request, client)
        if client.requests:
            self._push(client, client.end)
        else:
            self._tickets += 1  # as if it had another request: `__iter__` does not know
            self._rest(client)
        return entry

    def discard(self, request: Request) -> bool:
        """Remove a request that is not served; its client is not charged. Returns False if it is not queued."""
        for index, entry in enumerate(self._returned):  # few: those of a lost instance
            if entry.request is request:
                entry.gone = True
                del self._returned[index]
                self._count -= 1
                return True
        client = self._waiting.get(client_of(request, self._fair))
        found = None if client is None else client.requests.pop(request, None)
        if client is None or found is None:
            return False
        found.gone = True
        self._count -= 1
        if not client.requests:
            self._rest(client)
            if len(self._heap) > 2 * len(self._waiting) + 64:
                self._heap = [each for each in self._heap if each[2].requests and each[2].ticket == each[1]]
                heapq.heapify(self._heap)
        return True

    def __iter__(self) -> Iterator[Waiting]:
        """Yield the requests in the order in which they will be served if no other comes."""
        yield from self._returned
        # The heap is walked from its top down without changing it. The children of an entry that was visited, and the
        # next request of each visited client, are candidates: start, ticket, index in the heap or -1, client, requests.
        heap, tickets = self._heap, self._tickets
        candidates = [_candidate(heap, 0)] if heap else []
        while candidates:
            start, _, index, client, requests = candidates[0]
            entry = next(requests, None)
            if entry is not None:
                yield entry
                tickets += 1
                heapq.heapreplace(candidates, (start + _cost(entry.request, client), tickets, -1, client, requests))
            else:
                heapq.heappop(candidates)
            if index >= 0:
                for child in (2 * index + 1, 2 * index + 2):
                    if child < len(heap):
                        heapq.heappush(candidates, _candidate(heap, child))

    def check(self) -> None:
        """Recompute the invariants."""
        clients = self._waiting.values()
        assert self._count == len(self._returned) + sum(len(client.requests) for client in clients)
        assert all(client.requests for client in clients)
        valid = [id(client) for _, ticket, client in self._heap if client.requests and client.ticket == ticket]
        assert sorted(valid) == sorted(map(id, clients)), "each waiting client has one valid entry in the heap"
        assert len(self._heap) <= 2 * len(self._waiting) + 64 + len(valid)
        assert len(self._idle) <= MAX_IDLE_CLIENTS
        assert self._waiting or not (self._idle or self._heap), "a client is remembered although none waits"
        assert self._idle.keys().isdisjoint(self._waiting)

    def _push(self, client: _Client, start: float) -> None:
        self._tickets += 1
        client.ticket = self._tickets
        heapq.heappush(self._heap, (start, client.ticket, client))

    def _rest(self, client: _Client) -> None:
        """The client has no queued request left. What it got is remembered as long as it lies in the future."""
        del self._waiting[client.name]
        if not self._waiting:  # nobody waits: a new account begins
            self._idle.clear()
            self._heap.clear()
            return
        self._idle[client.name] = client
        while self._idle:
            first = next(iter(self._idle.values()))
            if first.end > self._now and len(self._idle) <= MAX_IDLE_CLIENTS:
                break
            self._idle.popitem(last=False)


_Candidate = tuple[float, int, int, _Client, "Iterator[Waiting]"]


def _candidate(heap: list[tuple[float, int, _Client]], index: int) -> _Candidate:
    start, ticket, client = heap[index]
    valid = client.ticket == ticket
    return start, ticket, index, client, iter(client.requests.values() if valid else ())


def _cost(request: Request, client: _Client) -> float:
    """Return how much virtual time a request takes of its client."""
    return (request.batch_size or 1) / client.weight


class ClientQuotas:
    """Counts the requests of each client, from their admission to their final response. Others are not remembered."""

    def __init__(self, fair: FairQueuing) -> None:
        self._fair = fair
        #: Client → how many admitted requests have no final response yet; no client has 0.
        self.counts: dict[str, int] = {}

    def admit(self, request: Request) -> int:
        """Count `request` and return 0; or return the quota that its client has used up."""
        client = client_of(request, self._fair)
        quota, count = self._fair.quota(client), self.counts.get(client, 0)
        if quota and count >= quota:
            return quota
        self.counts[client] = count + 1
        assert request.owner is not None, "a submitted request has an owner"
        request.owner = _CountedOwner(self, client, request.owner)
        return 0

    def ended(self, client: str) -> None:
        """A request of `client` got its final response."""
        count = self.counts[client] - 1
        if count:
            self.counts[client] = count
        else:
            del self.counts[client]


class _CountedOwner:
    """The owner of an admitted request: passes on each notification, and counts the end."""

    __slots__ = ("_client", "_owner", "_quotas")

    def __init__(self, quotas: ClientQuotas, client: str, owner: RequestOwner) -> None:
        self._quotas = quotas
        self._client = client
        self._owner = owner

    def responded(self, request: Request, response: Response) -> None:
        if response.final:
            self._quotas.ended(self._client)
        self._owner.responded(request, response)

    def consumed(self, request: Request, count: int) -> None:
        self._owner.consumed(request, count)

    def cancelled(self, request: Request) -> None:
        self._owner.cancelled(request)


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
