"""Fair order of the requests of one priority level, and the quotas of clients (`naiad.quota`). Pure.

Clients get shares by their weights. The rule is start-time fair queuing (Goyal, Vin, Cheng 1996). A client's next
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.config.fair_queuing import FairQueuing
    from kernel.serving.request import Request, RequestOwner
    from kernel.serving.response import Response
    from schedulers.queue import Waiting

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
