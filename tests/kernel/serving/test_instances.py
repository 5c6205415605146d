"""Instances of a model: which get batches, what is recorded of these, and what becomes of them when one is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import Unavailable, WorkerLost
from kernel.observe.execution_reports import ExecutionTimes
from kernel.serving.batch import Batch
from kernel.serving.events import InstanceIdle, InstanceLost, Submitted
from kernel.serving.instance import BatchRecord
from kernel.serving.instances import LONG_EXECUTION_NS, MAX_DEPTH
from kernel.serving.request import Request
from kernel.testing import FakeInstance, Lab, RecordingSink, model_spec
from schedulers.direct import direct

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.events import Event
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet

FAST_NS, SLOW_NS = 1_000, 2_000_000


def request(id: str = "") -> Request:
    return Request("m", [], RecordingSink(), id=id)


# ---- the record of batches ------------------------------------------------------------------


def record_of(count: int, *, concurrency: int = 1) -> tuple[BatchRecord, list[Batch]]:
    """Return a record of `count` batches, and these."""
    record = BatchRecord(concurrency)
    batches = [Batch([request()]) for _ in range(count)]
    for batch in batches:
        record.add(batch)
    return record, batches


def test_batches_are_numbered_in_the_order_of_dispatch_and_no_number_is_used_again() -> None:
    record, batches = record_of(2)
    assert [batch.number for batch in batches] == [1, 2]
    record.executed(1)
    record.executed(2)
    third = Batch([request()])
    record.add(third)
    assert third.number == 3


def test_without_concurrency_the_first_batch_is_started_and_batches_end_in_order() -> None:
    record, [first, second, third] = record_of(3)
    assert record.unstarted() == [second, third]
    for number in (2, 3, 4, 0):
        with pytest.raises(KeyError):
            record.executed(number)
    assert record.executed(1) is first
    assert record.unstarted() == [third]
    with pytest.raises(KeyError):
        record.executed(1)
    assert record.executed(2) is second
    assert record.executed(3) is third
    assert (record.unstarted(), record.batches) == ([], {})
    with pytest.raises(KeyError):
        record.executed(3)


def test_with_concurrency_batches_end_in_any_order_once_they_are_started() -> None:
    record, [first, second, third] = record_of(3, concurrency=2)
    assert record.unstarted() == [first, second, third]
    record.started(2)
    assert record.unstarted() == [first, third]
    with pytest.raises(KeyError):
        record.executed(1)
    record.started(1)
    assert record.unstarted() == [third]
    assert record.executed(2) is second
    record.started(3)
    assert record.executed(3) is third
    assert record.executed(1) is first
    assert record.batches == {}


def test_a_batch_that_the_instance_does_not_have_is_not_started() -> None:
    record, _ = record_of(1, concurrency=2)
    with pytest.raises(KeyError):
        record.started(2)
    record.started(1)
    record.executed(1)
    with pytest.raises(KeyError):
        record.started(1)


def test_only_an_instance_with_concurrency_says_what_it_starts() -> None:
    record, _ = record_of(2)
    with pytest.raises(KeyError):
        record.started(1)


# ---- dispatching ----------------------------------------------------------------------------


class Recorder:
    """A scheduler that only notes its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    async def __call__(self, spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
        while True:
            self.events.append(await inbox.next())


def recorded(*concurrencies: int) -> tuple[Lab, Recorder]:
    """Return a lab with an instance of each concurrency whose scheduler dispatches nothing."""
    recorder = Recorder()
    case = Lab(model_spec(), recorder, len(concurrencies))
    for worker, concurrency in zip(case.workers, concurrencies, strict=True):
        worker.record.concurrency = concurrency
    return case, recorder


def become_fast(case: Lab) -> None:
    """Let the model show that it is fast enough to be given work ahead of time."""
    for _ in range(64):
        case.instances.dispatch(case.workers[0], Batch([case.request("warm")]))
        case.finish(infer_ns=FAST_NS)


def test_a_batch_goes_to_the_instance_that_is_named() -> None:
    case, _ = recorded(1, 1)
    a, b = case.request("a"), case.request("b")
    case.instances.dispatch(case.workers[1], Batch([a]))
    case.instances.dispatch(case.workers[0], Batch([b]))
    assert [[batch.requests for batch in worker.batches] for worker in case.workers] == [[[b]], [[a]]]
    assert [case.live.instance_of[each] for each in (a, b)] == case.workers[::-1]
    assert list(case.workers[1].record.batches.values()) == [case.workers[1].batches[0]]
    assert case.live.queued == 0
    case.check()


def test_nothing_is_dispatched_to_an_instance_that_takes_no_batches() -> None:
    case, _ = recorded(1)
    waiting = case.request("a")
    for take_out in (case.instances.set_apart, case.instances.forget):
        take_out(case.workers[0])
        with pytest.raises(AssertionError, match="instance model_0 is not in service"):
            case.instances.dispatch(case.workers[0], Batch([waiting]))
    assert case.live.queued == 1
    assert not case.workers[0].batches


def test_padding_is_not_a_request() -> None:
    case, _ = recorded(1)
    only = case.request("a")
    case.instances.dispatch(case.workers[0], Batch([None, only], slots=[0, 1]))
    assert (len(case.live), case.live.queued) == (1, 0)
    case.check()


def test_an_instance_is_idle_until_it_has_as_many_batches_as_it_executes_at_the_same_time() -> None:
    case, _ = recorded(3)
    [worker] = case.workers
    for _ in range(3):
        assert case.instances.idle_instance() is worker
        assert case.instances.open_instance() is worker
        case.instances.dispatch(worker, Batch([case.request("a")]))
    assert case.instances.idle_instance() is None
    assert case.instances.open_instance() is None


def test_the_instance_with_the_least_to_do_comes_first() -> None:
    case, _ = recorded(1, 1, 2)
    one, _, double = case.workers
    order = []
    while (instance := case.instances.idle_instance()) is not None:
        order.append(instance)
        case.instances.dispatch(instance, Batch([case.request("a")]))
    assert order == [double, *case.workers]
    case.finish(0)
    assert case.instances.idle_instance() is one


def test_a_fast_instance_is_given_work_ahead_of_time_and_a_slow_one_is_not() -> None:
    case, _ = recorded(1)
    [worker] = case.workers
    case.instances.dispatch(worker, Batch([case.request("a")]))
    assert case.instances.open_instance() is case.instances.soon_idle_instance() is None
    case.finish(infer_ns=SLOW_NS)
    become_fast(case)
    for given in range(MAX_DEPTH):
        assert case.instances.open_instance() is worker
        assert (case.instances.soon_idle_instance() is worker) is (given < 2)
        assert (case.instances.idle_instance() is worker) is (given == 0)
        case.instances.dispatch(worker, Batch([case.request("a"), case.request("b")]))
    assert case.instances.open_instance() is None
    assert case.instances.waiting == 2 * (MAX_DEPTH - 1), "requests of the batches that are not started"


def become_slow(case: Lab) -> None:
    """Let the model show how long its executions take: `SLOW_NS`."""
    for _ in range(64):
        case.instances.dispatch(case.workers[0], Batch([case.request("warm")]))
        case.clock.time_ns += SLOW_NS
        case.finish(infer_ns=SLOW_NS)


def test_a_slow_instance_is_given_one_batch_when_it_is_about_to_end_the_last_one() -> None:
    case, _ = recorded(1)
    [worker] = case.workers
    become_slow(case)
    case.instances.dispatch(worker, Batch([case.request("a")]))
    begun_ns, at_ns = case.clock.time_ns, case.instances.next_batch_ns()
    assert at_ns is not None
    assert begun_ns < at_ns < begun_ns + SLOW_NS
    case.clock.time_ns = at_ns - 1
    assert case.instances.open_instance() is case.instances.soon_idle_instance() is None
    case.clock.time_ns = at_ns
    assert case.instances.open_instance() is case.instances.soon_idle_instance() is worker
    assert case.instances.idle_instance() is None
    case.instances.dispatch(worker, Batch([case.request("b")]))
    assert case.instances.open_instance() is case.instances.soon_idle_instance() is None
    assert case.instances.next_batch_ns() is None
    case.clock.time_ns = begun_ns + SLOW_NS
    case.finish(infer_ns=SLOW_NS)
    following_ns = case.instances.next_batch_ns()
    assert following_ns is not None
    assert case.clock.time_ns < following_ns < case.clock.time_ns + SLOW_NS, "the second batch has begun"
    case.finish(infer_ns=SLOW_NS)
    assert case.instances.next_batch_ns() is None


def test_a_slow_model_with_several_instances_or_with_calls_gets_nothing_ahead_of_time() -> None:
    def calling(case: Lab) -> None:
        case.instances.note_calls()

    def two_instances(case: Lab) -> None:
        case.instances.add(case.workers[1])

    for change in (calling, two_instances):
        case, _ = recorded(1, 1)
        case.instances.forget(case.workers[1])
        become_slow(case)
        change(case)
        while (instance := case.instances.idle_instance()) is not None:
            case.instances.dispatch(instance, Batch([case.request("a")]))
        case.clock.time_ns += SLOW_NS - 1
        assert case.instances.next_batch_ns() is None, change.__name__
        assert case.instances.soon_idle_instance() is None, change.__name__


def test_a_second_instance_ends_what_was_planned() -> None:
    case, _ = recorded(1, 1)
    case.instances.forget(case.workers[1])
    become_slow(case)
    case.instances.dispatch(case.workers[0], Batch([case.request("a")]))
    assert case.instances.next_batch_ns() is not None
    case.instances.add(case.workers[1])
    assert case.instances.next_batch_ns() is None


def test_a_very_long_execution_has_nothing_behind_it() -> None:
    case, _ = recorded(1)
    for _ in range(64):
        case.instances.dispatch(case.workers[0], Batch([case.request("long")]))
        case.clock.time_ns += 2 * LONG_EXECUTION_NS
        case.finish(infer_ns=2 * LONG_EXECUTION_NS)
    case.instances.dispatch(case.workers[0], Batch([case.request("long")]))
    assert case.instances.next_batch_ns() is None


def test_a_fast_instance_that_executes_several_batches_is_given_none_ahead_of_time() -> None:
    case, _ = recorded(2)
    [worker] = case.workers
    for _ in range(64):
        case.instances.dispatch(worker, Batch([case.request("warm")]))
        worker.record.started(worker.batches[0].number)
        case.finish(infer_ns=FAST_NS)
    for _ in range(2):
        assert case.instances.open_instance() is case.instances.soon_idle_instance() is worker
        case.instances.dispatch(worker, Batch([case.request("a")]))
    assert case.instances.open_instance() is None
    assert case.instances.soon_idle_instance() is None


def test_no_instance_is_open_where_there_is_none() -> None:
    case, _ = recorded()
    assert (case.instances.open_instance(), case.instances.idle_instance(), case.instances.count) == (None, None, 0)


# ---- events ---------------------------------------------------------------------------------


def test_the_scheduler_hears_which_instance_is_idle_while_requests_wait() -> None:
    case, recorder = recorded(1, 1)
    for worker in case.workers:
        case.instances.dispatch(worker, Batch([case.request("a")]))
    case.finish(1)
    assert recorder.events == [], "no request waits"
    case.request("b")
    case.finish(0)
    assert recorder.events == [InstanceIdle(case.workers[0])]
    new = FakeInstance("new")
    case.instances.add(new)
    assert recorder.events[1:] == [InstanceIdle(new)]


def test_the_scheduler_does_not_hear_of_an_instance_that_is_apart() -> None:
    case, recorder = recorded(1)
    case.instances.dispatch(case.workers[0], Batch([case.request("a")]))
    case.request("b")
    case.instances.set_apart(case.workers[0])
    case.finish(0)
    assert recorder.events == []


def test_a_lost_instance_brings_back_what_it_had_not_started() -> None:
    case, recorder = recorded(1, 1)
    worker, other = case.workers
    a, b, c, d = (case.request(id) for id in "abcd")
    for batch in (Batch([a]), Batch([b, c])):
        case.instances.dispatch(worker, batch)
    case.instances.dispatch(other, Batch([d]))
    case.lose(0)
    assert recorder.events == [InstanceLost(worker, [b, c])]
    assert a not in case.live.instance_of
    assert [case.live.instance_of[each] for each in (b, c, d)] == [None, None, other]
    assert [each.dispatched for each in (b, c, d)] == [False, False, True]
    assert (case.live.queued, case.instances.count, case.statistics.workers_lost) == (2, 1, 1)
    case.check()


def test_a_lost_instance_with_concurrency_brings_back_all_that_it_did_not_say_to_have_started() -> None:
    case, recorder = recorded(2)
    [worker] = case.workers
    a, b, c = (case.request(id) for id in "abc")
    for each in (a, b, c):
        case.instances.dispatch(worker, Batch([each]))
    worker.record.started(2)
    case.lose(0)
    assert recorder.events == [InstanceLost(worker, [a, c])]
    assert isinstance(b.sink, RecordingSink)
    assert [type(error) for error in b.sink.errors] == [WorkerLost]


def test_a_batch_under_a_wrong_number_is_found() -> None:
    case, _ = recorded(1)
    case.instances.dispatch(case.workers[0], Batch([case.request("a")]))
    batch = case.workers[0].batches[0]
    batch.number = 7
    with pytest.raises(AssertionError, match="batch 7 is recorded as 1"):
        case.check()
    batch.number = 1


# ---- instances that are apart: the scheduler does not see them, and they lose nothing --------


def lab(instances: int = 1) -> Lab:
    return Lab(model_spec(), direct, instances)


def submit(case: Lab, *ids: str) -> list[Request]:
    requests = [case.request(id) for id in ids]
    for each in requests:
        case.inbox.post(Submitted(each))
    return requests


def test_a_new_instance_that_is_apart_gets_only_what_is_given_to_itself() -> None:
    case = lab()
    new = FakeInstance("new")
    case.instances.set_apart(new)
    submit(case, "a", "b")
    assert case.running == [["a"]]
    assert (case.instances.count, len(new.batches)) == (1, 0)
    warm = request("warm")
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


def test_nothing_is_given_to_an_instance_that_was_lost_while_it_was_apart() -> None:
    case = lab()
    new = FakeInstance("new")
    case.instances.set_apart(new)
    case.instances.lost(new, [])
    with pytest.raises(Unavailable, match="model instance 'new' was lost"):
        case.instances.dispatch_apart(new, Batch([request()]))


def test_an_executed_batch_has_the_name_of_its_instance() -> None:
    lab = Lab(model_spec(), direct, instances=2)
    lab.inbox.post(Submitted(lab.request("a")))
    worker, batch = next((number, each.batches[0]) for number, each in enumerate(lab.workers) if each.batches)
    assert batch.instance == ""
    lab.finish(worker)
    assert batch.instance == lab.workers[worker].name
    lab.check()
