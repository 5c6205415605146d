"""A client has a limited number of requests queued or in flight."""

from __future__ import annotations

from kernel.config.fair_queuing import FairQueuing
from kernel.errors import Unavailable
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from schedulers.quota import ClientQuotas


class Owner:
    """Records what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def responded(self, request: Request, response: Response) -> None:
        self.heard.append(f"responded {response.final}")

    def consumed(self, request: Request, count: int) -> None:
        self.heard.append(f"consumed {count}")

    def cancelled(self, request: Request) -> None:
        self.heard.append("cancelled")


def request(tenant: str, owner: Owner | None = None) -> Request:
    made = Request("m", [], RecordingSink(), parameters={"tenant": tenant})
    made.owner = owner or Owner()
    return made


def test_a_quota_counts_requests_until_their_final_response() -> None:
    quotas = ClientQuotas(FairQueuing(parameter="tenant", quotas={"a": 2}, default_quota=1))
    first, second = request("a"), request("a")
    assert [quotas.admit(first), quotas.admit(second), quotas.admit(request("a"))] == [0, 0, 2]
    assert [quotas.admit(request("b")), quotas.admit(request("b"))] == [0, 1]
    first.respond(Response("m", "1", "", outputs=[], final=False))
    assert quotas.admit(request("a")) == 2
    first.respond(Response("m", "1", "", outputs=[]))
    assert quotas.admit(request("a")) == 0
    second.fail(Unavailable("gone"))
    assert quotas.counts == {"a": 1, "b": 1}


def test_clients_without_requests_are_forgotten_and_0_is_no_limit() -> None:
    quotas = ClientQuotas(FairQueuing(parameter="tenant", quotas={"free": 0}, default_quota=1))
    made = [request("free") for _ in range(100)]
    assert {quotas.admit(each) for each in made} == {0}
    for each in made:
        each.respond(Response("m", "1", "", outputs=[]))
    assert quotas.counts == {}


def test_the_owner_hears_everything_as_before() -> None:
    quotas, owner = ClientQuotas(FairQueuing(parameter="tenant", default_quota=1)), Owner()
    made = request("a", owner)
    quotas.admit(made)
    made.consumed(3)
    made.cancel()
    made.respond(Response("m", "1", "", outputs=[]))
    assert owner.heard == ["consumed 3", "cancelled", "responded True"]
