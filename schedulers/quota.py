"""How many requests each client of a model may have queued or in flight (`naiad.quota`). Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedulers.fair import client_of

if TYPE_CHECKING:
    from kernel.config.fair_queuing import FairQueuing
    from kernel.serving.request import Request, RequestOwner
    from kernel.serving.response import Response


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
