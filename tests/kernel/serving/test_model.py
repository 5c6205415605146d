"""A model whose scheduler fails: every request is answered, and nothing waits for a scheduler that is not there.

The record of live requests: each is queued, or one instance has it, until its final response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import DeadlineTooNear, InternalError, RequestCancelled, Unavailable
from kernel.serving.batch import Batch
from kernel.serving.events import Submitted
from kernel.serving.instances import Condition, InstanceSet, LiveRequests
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.testing import FakeClock, FakeInstance, RecordingSink, model_spec
from schedulers.direct import direct

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.serving.inbox import Inbox


def request() -> tuple[Request, RecordingSink]:
    sink = RecordingSink()
    return Request("model", [], sink), sink


def errors(sink: RecordingSink) -> list[str]:
    return [error.message for error in sink.errors]


class Failing:
    """Schedulers that fail at their first request, the later ones perhaps at their start."""

    def __init__(self, *, starts: int) -> None:
        self.starts = starts
        self.started = 0

    async def __call__(self, spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: object) -> None:
        self.started += 1
        if self.started > self.starts:
            raise RuntimeError("cannot start")
        while True:
            if isinstance(await inbox.next(), Submitted):
                raise RuntimeError("cannot run")


def model_with(schedule: Failing) -> Model:
    clock = FakeClock()
    model = Model(model_spec(), ModelConfig(), 1, schedule, clock)
    model.start()
    model.instances.add(FakeInstance("model_0"))
    return model


def test_a_scheduler_that_fails_is_replaced() -> None:
    model = model_with(Failing(starts=10))
    for _ in range(3):
        submitted, sink = request()
        model.submit(submitted)
        assert errors(sink) == ["the scheduler of model 'model' failed: cannot run"]
    assert model.ready


def test_a_scheduler_that_cannot_be_started_again_leaves_a_model_that_is_not_ready() -> None:
    model = model_with(Failing(starts=1))
    submitted, sink = request()
    model.submit(submitted)
    assert errors(sink) == ["the scheduler of model 'model' failed: cannot run"]
    assert not model.ready
    again, sink = request()
    with pytest.raises(InternalError, match="the scheduler of model 'model' failed: cannot run"):
        model.submit(again)
    assert not sink.responses
    assert model.in_flight == 0


def test_a_scheduler_that_cannot_be_started_is_told_to_who_loads_the_model() -> None:
    with pytest.raises(InternalError, match="the scheduler of model 'model' cannot start: cannot start"):
        model_with(Failing(starts=0))


def test_what_is_wrong_with_instances_is_said_until_it_ends_or_they_are_gone() -> None:
    model = Model(model_spec(), ModelConfig(), 1, direct, FakeClock())
    instances = [FakeInstance(f"model_{number}") for number in range(3)]
    for instance in instances:
        model.instances.add(instance)
        model.instances.set_condition(instance, Condition(f"{instance.name} busy"))
    assert model.trouble == "model_0 busy; model_1 busy; model_2 busy"
    model.instances.set_condition(instances[1], None)
    model.instances.forget(instances[2])
    assert model.trouble == "model_0 busy"
    assert model.ready


# ---- no instance lives --------------------------------------------------------------------------


def test_while_no_instance_can_be_started_requests_are_refused_at_once_with_the_reason() -> None:
    model = Model(model_spec(), ModelConfig(), 1, direct, FakeClock())
    model.start()
    waiting, sink = request()
    model.submit(waiting)
    assert errors(sink) == [], "the next worker may come soon"
    model.refuse(Unavailable("no instance of model 'model' is alive: no luck"))
    assert errors(sink) == ["no instance of model 'model' is alive: no luck"]
    with pytest.raises(Unavailable, match="no luck$"):
        model.submit(request()[0])
    model.refuse(Unavailable("no instance of model 'model' is alive: still no luck"))
    with pytest.raises(Unavailable, match="still no luck$"):
        model.submit(request()[0])
    model.accept()
    assert not model.ready
    model.instances.add(FakeInstance("model_0"))
    assert model.ready
    model.submit(request()[0])
    assert model.in_flight == 1


def test_a_request_that_waits_for_a_worker_longer_than_its_timeout_gets_an_error_that_says_so() -> None:
    clock = FakeClock()
    model = Model(model_spec(), ModelConfig(), 1, direct, clock)
    model.start()
    (short, short_sink), (long, long_sink), (endless, endless_sink) = request(), request(), request()
    for each, timeout_us in ((short, 1000), (long, 3000), (endless, 0)):
        each.timeout_us = timeout_us
        model.submit(each)
    clock.advance(999_999)
    model.expire_queued()
    assert errors(short_sink) == []
    clock.advance(1)
    for _ in range(2):
        model.expire_queued()
    assert errors(short_sink) == [
        "no instance of model 'model' is alive: its worker was lost and is started again, which takes longer than the "
        "request's timeout of 1000 microseconds"
    ]
    assert errors(long_sink) == errors(endless_sink) == []
    assert model.live.queued_requests() == [long, endless]
    long.cancel()
    assert [type(error) for error in long_sink.errors] == [RequestCancelled]
    model.check()


def test_a_version_that_was_closed_stays_closed_when_an_instance_comes_back() -> None:
    model = Model(model_spec(), ModelConfig(), 1, direct, FakeClock())
    model.start()
    model.refuse(Unavailable("no luck"))
    model.close(Unavailable("closed"))
    model.accept()
    with pytest.raises(Unavailable, match="^closed$"):
        model.submit(request()[0])


def test_a_request_that_cannot_be_executed_before_its_deadline_is_refused_and_others_are_queued() -> None:
    clock = FakeClock()
    model = Model(model_spec(), ModelConfig(), 1, direct, clock)
    model.start()
    model.instances.add(FakeInstance("model_0"))

    def submit(deadline_ns: int = 0) -> Request:
        submitted, _ = request()
        submitted.deadline_ns = deadline_ns
        model.submit(submitted)
        return submitted

    mean_ns = model.instances.mean_execution_ns()
    submit(deadline_ns=clock.now_ns() + 1)  # nothing waits: it is executed at once
    while not model.live.queued:
        submit()
    for _ in range(9):
        submit()
    with pytest.raises(DeadlineTooNear, match="the deadline of this one is in"):
        submit(deadline_ns=clock.now_ns() + 10 * mean_ns)
    assert not submit(deadline_ns=clock.now_ns() + 20 * mean_ns).finished
    assert model.statistics.refused == 1
    model.abandon(Unavailable("the test has ended"))


def test_thousands_of_requests_that_wait_too_long_for_a_worker_fail_some_in_each_iteration() -> None:
    clock = FakeClock()
    model = Model(model_spec(), ModelConfig(), 1, direct, clock)
    model.start()
    sinks = []
    for _ in range(2000):
        made, sink = request()
        made.timeout_us = 1
        model.submit(made)
        sinks.append(sink)
    clock.advance(1000)
    failed = 0
    while failed < len(sinks):
        model.expire_queued()
        before, failed = failed, sum(bool(sink.errors) for sink in sinks)
        assert 0 < failed - before <= 300
        clock.end_iteration()
    assert model.in_flight == 0


FIRST, SECOND = FakeInstance("m_0"), FakeInstance("m_1")


def queued(live: LiveRequests, count: int) -> list[Request]:
    """Return requests that were accepted one after the other."""
    requests = [Request("m", [], RecordingSink(), id=str(number)) for number in range(count)]
    for request in requests:
        live.add(request)
    return requests


def test_a_request_is_queued_from_its_acceptance() -> None:
    live = LiveRequests()
    requests = queued(live, 3)
    assert (len(live), live.queued) == (3, 3)
    assert live.queued_requests() == requests
    live.check([])


def test_an_instance_has_what_was_dispatched_to_it() -> None:
    live = LiveRequests()
    a, b, c = queued(live, 3)
    live.dispatched(Batch([a, b]), FIRST)
    live.dispatched(Batch([c]), SECOND)
    assert (len(live), live.queued) == (3, 0)
    assert [live.instance_of[request] for request in (a, b, c)] == [FIRST, FIRST, SECOND]
    assert [request.dispatched for request in (a, b, c)] == [True] * 3
    live.check([(FIRST, Batch([a, b])), (SECOND, Batch([c]))])


def test_what_an_instance_gives_back_is_queued_where_it_was() -> None:
    live = LiveRequests()
    a, b, c = queued(live, 3)
    live.dispatched(Batch([a, b]), FIRST)
    live.returned([b])
    assert live.queued == 2
    assert live.queued_requests() == [b, c], "in the order of acceptance"
    assert not b.dispatched
    live.check([(FIRST, Batch([a]))])


def test_a_final_response_ends_a_request_wherever_it_is() -> None:
    live = LiveRequests()
    a, b, c = queued(live, 3)
    live.dispatched(Batch([a, b]), FIRST)
    live.remove(a)
    assert (len(live), live.queued) == (2, 1)
    live.remove(c)
    assert (len(live), live.queued) == (1, 0)
    live.check([(FIRST, Batch([a, b]))])  # a batch goes on when one of its requests has its final response
    live.remove(b)
    assert (len(live), live.queued) == (0, 0)
    live.check([])


def test_a_request_ends_once() -> None:
    live = LiveRequests()
    [request] = queued(live, 1)
    live.remove(request)
    with pytest.raises(KeyError):
        live.remove(request)


def test_a_wrong_count_is_found() -> None:
    live = LiveRequests()
    queued(live, 2)
    live.queued = 1
    with pytest.raises(AssertionError, match="1 requests are counted as queued, 2 are"):
        live.check([])


def test_a_request_that_stays_after_its_final_response_is_found() -> None:
    live = LiveRequests()
    [request] = queued(live, 1)
    request.fail(InternalError("no"))  # it has no owner who removes it
    with pytest.raises(AssertionError, match="request '0' is live after its final response"):
        live.check([])


def test_a_wrong_mark_of_a_request_is_found() -> None:
    live = LiveRequests()
    [request] = queued(live, 1)
    request.dispatched = True
    with pytest.raises(AssertionError, match="request '0': dispatched is wrong"):
        live.check([])


def test_a_request_in_a_batch_of_another_instance_is_found() -> None:
    live = LiveRequests()
    [request] = queued(live, 1)
    live.dispatched(Batch([request]), FIRST)
    with pytest.raises(AssertionError, match="request '0' is in a batch of m_1, not of its instance"):
        live.check([(SECOND, Batch([request]))])
