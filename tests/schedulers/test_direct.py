"""Without batching: first come, first served, one request an instance."""

from __future__ import annotations

from kernel import errors
from kernel.events import Cancelled, NoInstanceLeft, Submitted
from kernel.testing import Lab, RecordingSink, model_spec
from schedulers.direct import direct


def lab(instances: int = 1) -> Lab:
    return Lab(model_spec(), direct, instances)


def test_a_request_runs_at_once_on_an_idle_instance() -> None:
    case = lab()
    case.inbox.post(Submitted(case.request("a")))
    assert case.running == [["a"]]


def test_requests_run_in_the_order_in_which_they_came() -> None:
    case = lab()
    for id in "abc":
        case.inbox.post(Submitted(case.request(id)))
    ran = []
    for _ in range(3):
        ran += case.running
        case.finish()
    assert ran == [["a"], ["b"], ["c"]]


def test_every_idle_instance_is_used() -> None:
    case = lab(instances=2)
    for id in "abc":
        case.inbox.post(Submitted(case.request(id)))
    assert sorted(case.running) == [["a"], ["b"]]


def test_a_cancelled_request_leaves_the_queue_and_is_answered() -> None:
    case = lab()
    case.inbox.post(Submitted(case.request("a")))
    waiting = case.request("b")
    case.inbox.post(Submitted(waiting))
    case.inbox.post(Cancelled(waiting))
    case.finish()
    assert case.running == []
    assert isinstance(waiting.sink, RecordingSink)
    assert [type(error) for error in waiting.sink.errors] == [errors.Cancelled]


def test_queued_requests_are_answered_when_no_instance_is_left() -> None:
    case = lab(instances=0)
    waiting = case.request("a")
    case.inbox.post(Submitted(waiting))
    case.inbox.post(NoInstanceLeft(errors.Unavailable("gone")))
    assert isinstance(waiting.sink, RecordingSink)
    assert [error.message for error in waiting.sink.errors] == ["gone"]


def test_a_lost_instance_takes_nothing_and_a_restarted_one_goes_on_with_the_queue() -> None:
    case = lab()
    case.inbox.post(Submitted(case.request("a")))
    case.inbox.post(Submitted(case.request("b")))
    worker = case.workers[0]
    case.instances.lost(worker)
    worker.batch = None
    assert case.running == []
    case.instances.add(worker)
    assert case.running == [["b"]]
