"""Clients of one priority level get shares by their weights, however many requests each sends.

A client has a limited number of requests queued or in flight.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.fair_queuing import FairQueuing
from kernel.errors import Unavailable
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.testing import RecordingSink
from schedulers.queue import MAX_NAME_LENGTH, ClientQuotas, FairOrder, Waiting, client_of

FAIR = FairQueuing(parameter="tenant", weights={"gold": 4, "silver": 2})


def waiting(client: str, rows: int = 1, id: str = "") -> Waiting:
    made = Request("m", [], RecordingSink(), id=id, parameters={"tenant": client})
    made.batch_size = rows
    return Waiting(made, None, None)


def client(entry: Waiting) -> str:
    return str(entry.request.parameters["tenant"])


def order_of(*entries: Waiting, fair: FairQueuing = FAIR) -> FairOrder:
    order = FairOrder(fair)
    for entry in entries:
        order.append(entry)
    return order


def drain(order: FairOrder) -> list[str]:
    found = []
    while order:
        found.append(client(order.popleft()))
        order.check()
    return found


def test_a_client_with_one_request_does_not_wait_behind_a_client_with_many() -> None:
    order = order_of(*(waiting("a") for _ in range(100)))
    assert client(order.popleft()) == "a"
    order.append(waiting("b"))
    assert drain(order)[:2] == ["b", "a"]


def test_clients_get_shares_by_their_weights() -> None:
    order = order_of(*(waiting(name) for _ in range(40) for name in ("gold", "silver", "other")))
    assert Counter(client(order.popleft()) for _ in range(70)) == {"gold": 40, "silver": 20, "other": 10}


def test_shares_count_rows() -> None:
    order = order_of(*(waiting("wide", rows=4) for _ in range(20)), *(waiting("narrow") for _ in range(80)))
    rows: Counter[str] = Counter()
    for _ in range(50):
        entry = order.popleft()
        rows[client(entry)] += entry.request.batch_size
    assert rows == {"wide": 40, "narrow": 40}


def test_requests_of_one_client_keep_their_order() -> None:
    order = order_of(*(waiting("a", id=str(number)) for number in range(5)))
    assert [order.popleft().request.id for _ in range(5)] == list("01234")


def test_a_client_that_was_idle_has_no_claim_to_the_past() -> None:
    order = order_of(*(waiting("busy") for _ in range(60)))
    for _ in range(50):
        order.popleft()
    for _ in range(10):
        order.append(waiting("late"))
    assert Counter(client(order.popleft()) for _ in range(10)) == {"busy": 5, "late": 5}


def test_a_client_that_leaves_and_returns_cannot_be_served_first_each_time() -> None:
    order = order_of(*(waiting("steady") for _ in range(20)))
    served = []
    for _ in range(10):
        order.append(waiting("jumpy"))
        served += [client(order.popleft()), client(order.popleft())]
    assert Counter(served) == {"steady": 10, "jumpy": 10}


def test_cancelled_requests_cost_their_client_nothing() -> None:
    gone = [waiting("a") for _ in range(50)]
    order = order_of(*gone, *(waiting("b") for _ in range(10)))
    for entry in gone:
        assert order.discard(entry.request)
        order.check()
    assert not order.discard(gone[0].request)
    for _ in range(10):
        order.append(waiting("a"))
    assert Counter(client(order.popleft()) for _ in range(10)) == {"a": 5, "b": 5}


def test_requests_that_came_back_go_first_and_are_not_charged_again() -> None:
    order = order_of(waiting("a", id="first"), waiting("b", id="second"))
    first = order.popleft()
    order.appendleft(first)
    assert [entry.request.id for entry in order] == ["first", "second"]
    assert order.popleft() is first
    order.appendleft(first)
    assert order.discard(first.request)
    assert drain(order) == ["b"]


def test_idle_clients_are_forgotten() -> None:
    order = order_of(*(waiting("busy") for _ in range(3000)))
    for number in range(5000):
        order.append(waiting(f"once{number}"))
        while client(order.popleft()) == "busy":
            order.append(waiting("busy"))
        order.check()
    drain(order)
    order.check()


def test_clients_that_cancel_everything_leave_nothing_behind() -> None:
    order = order_of(waiting("busy"))
    for number in range(1000):
        entry = waiting(f"c{number}")
        order.append(entry)
        order.discard(entry.request)
        order.check()


@pytest.mark.parametrize(
    ("fair", "name"),
    [(FAIR, "7"), (FairQueuing(header="x-key"), "secret"), (FairQueuing(header="x-other"), "")],
)
def test_a_client_is_known_by_a_parameter_or_a_header(fair: FairQueuing, name: str) -> None:
    sink = RecordingSink()
    sink.headers["x-key"] = "secret"
    assert client_of(Request("m", [], sink, parameters={"tenant": 7}), fair) == name


def test_long_names_are_cut() -> None:
    assert len(client_of(Request("m", [], RecordingSink(), parameters={"tenant": "x" * 9999}), FAIR)) == MAX_NAME_LENGTH


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(["gold", "silver", "c", "d"]), st.integers(1, 5)),
        st.tuples(st.sampled_from(["take", "cancel", "return"]), st.integers(0, 9), st.just(0)),
    ),
    max_size=80,
)


@given(steps)
def test_the_order_that_is_shown_is_the_order_of_service(given_steps: list[tuple[str, str | int, int]]) -> None:
    order = FairOrder(FAIR)
    taken: list[Waiting] = []
    for kind, which, rows in given_steps:
        if kind == "add":
            order.append(waiting(str(which), rows))
        elif kind == "take" and order:
            shown = list(order)
            assert len({id(entry) for entry in shown}) == len(shown) == len(order)
            taken = [order.popleft() for _ in range(min(len(order), int(which) + 1))]
            assert [id(entry) for entry in taken] == [id(entry) for entry in shown[: len(taken)]]
        elif kind == "cancel" and order:
            assert order.discard(list(order)[int(which) % len(order)].request)
        elif kind == "return" and taken:
            order.appendleft(taken.pop())
        order.check()


@given(st.integers(0, 2**32), st.lists(st.integers(1, 6), min_size=2, max_size=5))
def test_no_two_clients_that_wait_drift_apart_by_more_than_a_request_of_each(seed: int, weights: list[int]) -> None:
    chance = random.Random(seed)
    names = [f"c{number}" for number in range(len(weights))]
    order = FairOrder(FairQueuing(parameter="tenant", weights=dict(zip(names, map(float, weights), strict=True))))
    largest = 7
    for name in names:
        for _ in range(60):
            order.append(waiting(name, chance.randint(1, largest)))
    served = dict.fromkeys(names, 0.0)
    for _ in range(50):  # no client runs out of requests
        entry = order.popleft()
        served[client(entry)] += entry.request.batch_size / weights[names.index(client(entry))]
        for one, first in enumerate(names):
            for two, second in enumerate(names[:one]):
                bound = largest / weights[one] + largest / weights[two]
                assert abs(served[first] - served[second]) <= bound + 1e-9


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
