"""The live requests of a model version: which the response cache has, which are queued, and which instance has each of
the others. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.batch import Batch
    from kernel.serving.instance import Instance
    from kernel.serving.request import Request
    from kernel.serving.response import Response


class LiveRequests:
    """Requests that were accepted and have no final response yet.

    Each is at the response cache, queued, or dispatched to an instance.
    """

    def __init__(self) -> None:
        #: By request: its instance, or None while it is queued.
        self.instance_of: dict[Request, Instance | None] = {}
        #: How many requests are queued.
        self.queued = 0
        #: What the response cache has: requests that are looked up, and responses that wait until they are stored.
        self.at_cache: set[Request | Response] = set()

    def __len__(self) -> int:
        return len(self.instance_of) + len(self.at_cache)

    def add(self, request: Request) -> None:
        """Add an accepted request, which is queued."""
        self.instance_of[request] = None
        self.queued += 1

    def dispatched(self, batch: Batch, instance: Instance) -> None:
        """Note that the queued requests of `batch` were dispatched to `instance`."""
        instance_of = self.instance_of
        for request in batch.entries:
            if request is not None:
                instance_of[request] = instance
                request.dispatched = True
                self.queued -= 1

    def returned(self, requests: Iterable[Request]) -> None:
        """Note that requests of a lost instance are queued again."""
        for request in requests:
            self.instance_of[request] = None
            request.dispatched = False
            self.queued += 1

    def remove(self, request: Request) -> None:
        """Remove a request that got its final response."""
        if self.instance_of.pop(request) is None:
            self.queued -= 1

    def queued_requests(self) -> list[Request]:
        """Return the queued requests, oldest first."""
        return [request for request, instance in self.instance_of.items() if instance is None]

    def check(self, batches: Iterable[tuple[Instance, Batch]]) -> None:
        """Recompute the invariants; `batches` are the unfinished batches of all instances."""
        queued = len(self.queued_requests())
        assert self.queued == queued, f"{self.queued} requests are counted as queued, {queued} are"
        for request, instance in self.instance_of.items():
            assert not request.finished, f"request {request.id!r} is live after its final response"
            assert request.dispatched is (instance is not None), f"request {request.id!r}: dispatched is wrong"
        both = self.at_cache & self.instance_of.keys()
        assert not both, f"{len(both)} requests are at the cache and at the scheduler"
        for instance, batch in batches:
            for request in batch.requests:
                has = self.instance_of.get(request, instance)
                assert has is instance, f"request {request.id!r} is in a batch of {instance.name}, not of its instance"
