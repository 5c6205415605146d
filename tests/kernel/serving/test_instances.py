"""Instances of a model: which get batches, what is recorded of these, and what becomes of them when one is lost."""

from __future__ import annotations

import pytest

from kernel.errors import Unavailable, WorkerLost
from kernel.observe.statistics import ExecutionTimes
from kernel.serving.batch import Batch
from kernel.serving.events import Submitted
from kernel.serving.request import Request
from kernel.testing import FakeInstance, Lab, RecordingSink, model_spec
from schedulers.direct import direct


def lab(instances: int = 1) -> Lab:
    return Lab(model_spec(), direct, instances)


def submit(case: Lab, *ids: str) -> list[Request]:
    requests = [case.request(id) for id in ids]
    for request in requests:
        case.inbox.post(Submitted(request))
    return requests


def test_a_new_instance_that_is_apart_gets_only_what_is_given_to_itself() -> None:
    case = lab()
    new = FakeInstance("new")
    case.instances.set_apart(new)
    submit(case, "a", "b")
    assert case.running == [["a"]]
    assert (case.instances.count, len(new.batches)) == (1, 0)
    warm = case.request("warm")
    case.instances.dispatch_apart(new, Batch([warm]))
    assert [batch.requests for batch in new.batches] == [[warm]]
    batch = new.record.executed(new.batches.popleft().number)
    case.instances.executed(new, batch, ExecutionTimes(0, 0, 1_000_000, 1_000_000))
    case.instances.add(new)
    assert case.instances.count == 2
    assert [request.id for request in new.batches[0].requests] == ["b"]
    assert case.statistics.workers_restarted == 0


def test_an_instance_that_is_taken_out_of_service_finishes_what_it_has() -> None:
    case = lab(instances=2)
    submit(case, "a", "b", "c")
    case.instances.set_apart(case.workers[0])
    case.finish(0)
    assert case.running == [["b"]], "c waits for the instance that is left"
    case.finish(1)
    assert case.running == [["c"]]
    assert case.statistics.execution_count == 2
    case.instances.forget(case.workers[0])
    assert case.instances.count == 1


def test_work_that_was_given_ahead_goes_with_the_instance() -> None:
    case = lab(instances=2)
    for _ in range(200):  # executions become known to be fast
        submit(case, "x")
        worker = next(number for number, worker in enumerate(case.workers) if worker.batches)
        case.finish(worker, infer_ns=1000)
    submit(case, "a", "b", "c", "d")
    assert case.instances.waiting == 2
    case.instances.set_apart(case.workers[0])
    assert case.instances.waiting == 2
    ids = [batch.requests[0].id for batch in case.workers[0].batches]
    while case.workers[0].batches:
        case.finish(0)
    assert len(ids) == 2
    assert len(case.workers[1].batches) == 2


def test_an_instance_that_is_lost_while_it_leaves_gives_back_what_it_had_not_started() -> None:
    case = lab(instances=2)
    for _ in range(200):
        submit(case, "x")
        worker = next(number for number, worker in enumerate(case.workers) if worker.batches)
        case.finish(worker, infer_ns=1000)
    submit(case, "a", "b", "c", "d")
    leaving = case.workers[0]
    case.instances.set_apart(leaving)
    first, second = [batch.requests for batch in leaving.batches]
    case.lose()
    assert isinstance(first[0].sink, RecordingSink)
    assert [type(error) for error in first[0].sink.errors] == [WorkerLost]
    assert not second[0].finished
    assert second[0].id in [batch.requests[0].id for batch in case.workers[1].batches]


def test_a_warm_up_is_told_of_an_instance_that_was_lost() -> None:
    case = lab()
    new = FakeInstance("new")
    case.instances.set_apart(new)
    case.instances.lost(new, [])
    with pytest.raises(Unavailable, match="model instance 'new' was lost"):
        case.instances.dispatch_apart(new, Batch([Request("m", [], RecordingSink())]))
