"""Rules of routes: which version executes a request, and requests that wait until that is decided."""

from __future__ import annotations

import asyncio

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import InvalidArgument, RequestCancelled, ServerStopping, ServingError, Unavailable
from kernel.serving.catalog import ModelState
from kernel.serving.model import Model
from kernel.serving.prepared import prepare
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.serving.route import ENDED_AT_ONCE, Wait
from kernel.testing import FakeClock, FakeInstance, RecordingSink, model_spec
from schedulers.direct import direct
from shm.tensor import Tensor
from tests.protocols.front_door_lab import FrontDoorLab

SECOND_NS = 1_000_000_000


class Rule:
    """Leads to `model`; while that is None requests wait."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.model: Model | None = None
        self.error: ServingError | None = None
        self.asked = 0

    def choose(self, request: Request) -> Model | Wait:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.model or Wait(self.clock.now_ns() + SECOND_NS, Unavailable("no version came in time"))

    def choose_for(self, request: Request, parent: Request) -> Model | None:
        return self.model


class Bench:
    """A model with two versions, whose route has a rule."""

    def __init__(self, dims: tuple[int, ...] = (-1,)) -> None:
        self.lab = FrontDoorLab()
        self.kernel = self.lab.kernel
        self.instances = [FakeInstance("m_1"), FakeInstance("m_2")]
        self.models = [self.add_version(number, instance, dims) for number, instance in enumerate(self.instances, 1)]
        self.rule = Rule(self.lab.clock)
        self.kernel.rules.set("m", self.rule)

    def add_version(self, version: int, instance: FakeInstance, dims: tuple[int, ...]) -> Model:
        model = Model(model_spec("m", dims=dims), ModelConfig(), version, direct, self.lab.clock)
        model.start()
        model.instances.add(instance)
        self.lab.catalog.set_state("m", version, ModelState.READY, "", model)
        return model

    def send(self, count: int = 1, **fields: str) -> Request:
        request = made(count, **fields)
        self.kernel.submit(request)
        self.kernel.check()
        return request


def made(count: int = 1, **fields: str) -> Request:
    tensor = Tensor("IN", "FP32", [count], bytes(4 * count))
    return Request("m", [tensor], RecordingSink(), **fields)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def error_of(request: Request) -> ServingError:
    assert isinstance(request.sink, RecordingSink)
    [response] = request.sink.responses
    assert response.error is not None
    return response.error


def test_a_rule_chooses_the_version_for_each_request(bench: Bench) -> None:
    for place in (0, 1, 0):
        bench.rule.model = bench.models[place]
        request = bench.send()
        assert request in bench.models[place].live.instance_of
        request.respond(Response("m", "1", "", outputs=[]))


def test_a_prepared_request_belongs_to_the_route_and_not_to_a_version(bench: Bench) -> None:
    prepared = prepare(made(), bench.kernel.route("m"))
    for model in bench.models:
        bench.rule.model = model
        request = prepared.with_inputs([Tensor("IN", "FP32", [1], bytes(4))], "", RecordingSink())
        bench.kernel.submit(request, prepared)
        assert request in model.live.instance_of


def test_a_prepared_request_is_checked_again_for_a_version_with_another_signature(bench: Bench) -> None:
    prepared = prepare(made(), bench.kernel.route("m"))
    other = bench.rule.model = bench.add_version(3, FakeInstance("m_3"), (7,))
    request = prepared.with_inputs([Tensor("IN", "FP32", [1], bytes(4))], "", RecordingSink())
    bench.kernel.submit(request, prepared)
    assert "unexpected shape" in error_of(request).message
    assert not other.in_flight


def test_a_rule_may_refuse_a_request(bench: Bench) -> None:
    bench.rule.error = Unavailable("not now")
    assert error_of(bench.send()).message == "not now"


def test_a_request_that_waits_counts_and_is_executed_when_the_rule_decides(bench: Bench) -> None:
    waiting = [bench.send(id="a" * 100), bench.send(5000)]
    assert (bench.kernel.in_flight, len(bench.kernel.waiting)) == (2, 2)
    assert bench.kernel.budget.used_byte_size > 2000
    received = waiting[0].received_ns
    bench.lab.clock.advance(SECOND_NS // 2)
    bench.rule.model = bench.models[1]
    bench.kernel.waiting.decide_again(bench.rule)
    bench.kernel.check()
    assert bench.rule.asked == 4
    assert (len(bench.kernel.waiting), bench.models[1].in_flight) == (0, 2)
    assert waiting[0].received_ns == received, "its duration includes the wait"
    for request in waiting:
        request.respond(Response("m", "2", "", outputs=[]))
    assert bench.kernel.in_flight == 0
    assert bench.kernel.budget.used_byte_size == 0


def test_a_request_that_does_not_fit_does_not_wait(bench: Bench) -> None:
    request = Request("m", [], RecordingSink())
    bench.kernel.submit(request)
    assert isinstance(error_of(request), InvalidArgument)
    assert bench.kernel.in_flight == 0


def test_a_request_waits_no_longer_than_the_rule_says(bench: Bench) -> None:
    first = bench.send()
    bench.lab.clock.advance(SECOND_NS // 2)
    second = bench.send()
    bench.lab.clock.advance(SECOND_NS // 2)
    assert error_of(first).message == "no version came in time"
    assert not second.finished
    bench.lab.clock.advance(SECOND_NS // 2)
    assert second.finished
    assert bench.kernel.in_flight == bench.kernel.budget.used_byte_size == 0


def test_a_client_that_leaves_ends_the_wait(bench: Bench) -> None:
    request = bench.send()
    request.cancel()
    assert isinstance(error_of(request), RequestCancelled)
    bench.kernel.waiting.decide_again(bench.rule)
    assert bench.rule.asked == 1
    assert bench.kernel.in_flight == bench.kernel.budget.used_byte_size == 0


def test_a_server_that_stops_waits_for_those_that_wait_and_lets_no_other_one_wait(bench: Bench) -> None:
    async def main() -> None:
        request = bench.send()
        draining = asyncio.create_task(bench.kernel.drain())
        await asyncio.sleep(0)
        assert isinstance(error_of(bench.send()), ServerStopping)
        bench.rule.model = bench.models[0]
        bench.kernel.waiting.decide_again(bench.rule)
        await asyncio.sleep(0)
        assert not draining.done()
        request.respond(Response("m", "1", "", outputs=[]))
        await draining

    asyncio.run(main())


def test_the_end_of_the_exit_timeout_fails_those_that_wait(bench: Bench) -> None:
    request = bench.send()
    bench.kernel.abandon()
    assert isinstance(error_of(request), Unavailable)
    bench.kernel.check()


def test_without_its_rule_a_name_leads_to_the_newest_version(bench: Bench) -> None:
    bench.kernel.rules.set("m", None)
    assert bench.send() in bench.models[1].live.instance_of


@pytest.mark.parametrize("comes", [True, False])
def test_thousands_of_waits_end_some_in_each_iteration(comes: bool) -> None:
    bench = Bench()
    requests = [made() for _ in range(3 * ENDED_AT_ONCE)]
    for request in requests:
        bench.kernel.submit(request)
    cancelled = requests[2 * ENDED_AT_ONCE]
    if comes:
        bench.rule.model = bench.models[1]
        bench.kernel.waiting.decide_again(bench.rule)
    else:
        bench.lab.clock.time_ns += SECOND_NS - 1
        bench.lab.clock.advance(1)
    left = len(bench.kernel.waiting)
    assert left >= ENDED_AT_ONCE
    cancelled.cancel()
    bench.kernel.check()
    while left := len(bench.kernel.waiting):
        bench.lab.clock.end_iteration()
        assert 0 <= left - len(bench.kernel.waiting) <= ENDED_AT_ONCE
    assert isinstance(cancelled.sink, RecordingSink)
    assert [type(error) for error in cancelled.sink.errors] == [RequestCancelled]
    refused = [request for request in requests if request.finished and request is not cancelled]
    assert len(refused) == (0 if comes else len(requests) - 1)
    assert bench.models[1].in_flight == (len(requests) - 1 if comes else 0)


def test_requests_that_wait_again_are_asked_once_each_time_and_in_their_order(bench: Bench) -> None:
    requests = [bench.send() for _ in range(2 * ENDED_AT_ONCE)]
    bench.rule.asked = 0
    for _ in range(5):  # a rule that may decide again and again, before those of the first time were asked
        bench.kernel.waiting.decide_again(bench.rule)
    bench.lab.clock.end_iteration()
    while bench.rule.asked % len(requests):
        bench.lab.clock.end_iteration()
    asked = bench.rule.asked
    assert asked <= 5 * ENDED_AT_ONCE + len(requests), "a request was asked again that had just begun to wait"
    bench.lab.clock.end_iteration()
    assert bench.rule.asked == asked
    bench.rule.model = bench.models[1]
    bench.kernel.waiting.decide_again(bench.rule)
    while len(bench.kernel.waiting):
        bench.kernel.check()
        bench.lab.clock.end_iteration()
    assert set(bench.models[1].live.instance_of) == set(requests)
