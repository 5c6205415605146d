"""The dynamic batcher as a scheduler, against a clock that moves when it is told to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kernel import errors
from kernel.config.fair_queuing import FairQueuing
from kernel.config.spec import DynamicBatching, QueuePolicy
from kernel.serving.events import FAILED_AT_ONCE, Cancelled, NoInstanceLeft, Submitted
from kernel.serving.instances import FAST_EXECUTION_NS
from kernel.testing import FakeInstance, Lab, RecordingSink, model_spec
from schedulers.batching_rules import BatchingRule
from schedulers.dynamic import dynamic
from schedulers.queue import EXPIRED_AT_ONCE
from schedulers.start_hold import VARIABLE

if TYPE_CHECKING:
    from kernel.serving.request import Request

US = 1000


def lab(
    settings: DynamicBatching | None,
    instances: int = 1,
    max_batch_size: int = 4,
    dims: tuple[int, ...] = (1,),
    **attributes: object,
) -> Lab:
    spec = model_spec(max_batch_size=max_batch_size, dims=dims, dynamic_batching=settings)
    return Lab(msgspec.structs.replace(spec, **attributes), dynamic, instances)


def submit(case: Lab, *ids: str, rows: int = 1) -> list[Request]:
    """Submit requests that come in one event-loop iteration."""
    requests = [case.request(id, rows) for id in ids]
    for request in requests:
        case.inbox.post(Submitted(request))
    case.clock.end_iteration()
    return requests


def finish(case: Lab) -> None:
    """Let the instance answer its batch, in a turn of its own."""
    case.finish()
    case.clock.end_iteration()


def errors_of(request: Request) -> list[type]:
    assert isinstance(request.sink, RecordingSink)
    return [type(error) for error in request.sink.errors]


def test_without_a_delay_a_lone_request_runs_at_once() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(4,)))
    submit(case, "a")
    assert case.running == [["a"]]


def test_what_comes_in_one_iteration_of_the_loop_runs_together() -> None:
    case = lab(DynamicBatching())
    submit(case, "a", "b", "c")
    assert case.running == [["a", "b", "c"]]


def test_what_comes_with_an_answer_joins_those_that_waited_for_it() -> None:
    case = lab(DynamicBatching())
    submit(case, "a")
    submit(case, "b")
    case.finish()
    case.inbox.post(Submitted(case.request("c")))
    assert case.running == []
    case.clock.advance(US)
    assert case.running == [["b", "c"]]


def test_what_came_while_the_instance_was_busy_runs_together() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(4,)))
    submit(case, "a")
    submit(case, "b", "c", "d")
    finish(case)
    assert case.running == [["b", "c", "d"]]


def test_a_batch_has_at_most_max_batch_size_rows() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(4,)))
    submit(case, "a")
    submit(case, "b", "c", "d", rows=2)
    finish(case)
    assert case.running == [["b", "c"]]


def test_a_lone_request_waits_for_the_queue_delay() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_ns=100 * US))
    submit(case, "a")
    case.clock.advance(100 * US - 1)
    assert case.running == []
    case.clock.advance(1)
    assert case.running == [["a"]]


def test_a_full_batch_does_not_wait() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_ns=100 * US))
    submit(case, "a", "b", "c")
    assert case.running == []
    submit(case, "d")
    assert case.running == [["a", "b", "c", "d"]]


def test_a_preferred_size_is_taken_before_the_delay_has_passed() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(2,), max_queue_delay_ns=100 * US))
    submit(case, "a")
    submit(case, "b")
    assert case.running == [["a", "b"]]


def test_after_the_delay_everything_that_fits_goes_and_not_the_preferred_size_alone() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(2,), max_queue_delay_ns=100 * US))
    submit(case, "x", "y")
    submit(case, "a", "b", "c")
    case.clock.advance(200 * US)
    finish(case)
    assert case.running == [["a", "b", "c"]]


def test_waiting_for_a_batch_needs_no_alarm_while_every_instance_is_busy() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(4,), max_queue_delay_ns=100 * US))
    submit(case, "a", "b", "c", "d", "e")
    case.clock.advance(10_000 * US)  # the fake clock refuses an alarm in the past
    finish(case)
    assert case.running == [["e"]]


def test_requests_of_different_shapes_do_not_share_a_batch() -> None:
    case = lab(DynamicBatching(preferred_batch_sizes=(4,)), dims=(-1,))
    submit(case, "busy")
    for id, width in (("a", 3), ("b", 3), ("c", 5)):
        case.inbox.post(Submitted(case.request(id, shape=[width])))
    finish(case)
    assert case.running == [["a", "b"]]
    finish(case)
    assert case.running == [["c"]]


def test_a_full_queue_refuses_at_once() -> None:
    case = lab(DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1)), max_batch_size=1)
    _, _, refused = submit(case, "a", "b", "c")
    assert errors_of(refused) == [errors.QueueFull]


def test_a_full_queue_takes_more_where_what_it_holds_can_start() -> None:
    case = lab(DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=1)), instances=2, max_batch_size=1)
    *accepted, refused = submit(case, "a", "b", "c", "d")
    assert case.running == [["a"], ["b"]]
    assert [errors_of(request) for request in accepted] == [[], [], []]
    assert errors_of(refused) == [errors.QueueFull]


def test_a_request_that_waits_too_long_is_rejected() -> None:
    policy = QueuePolicy(default_timeout_ns=50 * US)
    case = lab(DynamicBatching(default_queue_policy=policy), max_batch_size=1)
    _, late = submit(case, "a", "b")
    case.clock.advance(50 * US)
    assert errors_of(late) == [errors.QueueTimeout]


def test_a_delayed_request_is_served_after_those_in_time() -> None:
    policy = QueuePolicy(default_timeout_ns=50 * US, delay_on_timeout=True)
    case = lab(DynamicBatching(default_queue_policy=policy), max_batch_size=1)
    submit(case, "a", "late")
    case.clock.advance(60 * US)
    submit(case, "new")
    finish(case)
    assert case.running == [["new"]]
    finish(case)
    assert case.running == [["late"]]


def test_a_request_may_shorten_its_time_out_where_the_policy_allows_it() -> None:
    policy = QueuePolicy(default_timeout_ns=50 * US, allow_timeout_override=True)
    case = lab(DynamicBatching(default_queue_policy=policy), max_batch_size=1)
    submit(case, "a")
    hurried = case.request("b", timeout_us=10)
    case.inbox.post(Submitted(hurried))
    case.clock.advance(10 * US)
    assert errors_of(hurried) == [errors.QueueTimeout]


def test_a_higher_priority_is_served_first() -> None:
    case = lab(DynamicBatching(priority_levels=2, default_priority_level=2), max_batch_size=1)
    submit(case, "busy", "low")
    case.inbox.post(Submitted(case.request("high", priority=1)))
    finish(case)
    assert case.running == [["high"]]


def test_a_cancelled_request_is_not_executed() -> None:
    case = lab(DynamicBatching(), max_batch_size=1)
    _, waiting = submit(case, "a", "b")
    case.inbox.post(Cancelled(waiting))
    finish(case)
    assert case.running == []
    assert errors_of(waiting) == [errors.RequestCancelled]


def test_many_cancelled_requests_are_answered_and_the_rest_is_served() -> None:
    case = lab(DynamicBatching(), max_batch_size=1)
    _, *waiting, last = submit(case, "a", *(str(number) for number in range(300)), "last")
    for request in waiting:
        case.inbox.post(Cancelled(request))
        case.inbox.post(Cancelled(request))
    assert {tuple(errors_of(request)) for request in waiting} == {(errors.RequestCancelled,)}
    finish(case)
    assert case.running == [["last"]]
    assert errors_of(last) == []


def make_fast(case: Lab) -> None:
    """Let the model show that it is fast enough to get a batch ahead of time."""
    for _ in range(8):
        submit(case, "warm")
        case.finish(infer_ns=10_000)


def test_a_fast_model_gets_one_batch_ahead_of_time_and_the_next_one_grows() -> None:
    case = lab(DynamicBatching())
    make_fast(case)
    submit(case, "a")
    submit(case, "b")
    submit(case, "c")
    submit(case, "d")
    assert (case.running, case.ahead) == ([["a"]], [["b"]])
    case.finish(infer_ns=10_000)
    case.clock.end_iteration()
    assert (case.running, case.ahead) == ([["b"]], [["c", "d"]])


def test_full_batches_of_a_fast_model_go_ahead_together() -> None:
    case = lab(DynamicBatching(), max_batch_size=2)
    make_fast(case)
    submit(case, "a", "b", "c", "d", "e", "f", "g")
    assert (case.running, case.ahead) == ([["a", "b"]], [["c", "d"], ["e", "f"]])
    submit(case, "h")
    assert case.ahead == [["c", "d"], ["e", "f"], ["g", "h"]]


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_requests_of_a_fast_model_without_batches_go_ahead_at_once(max_batch_size: int) -> None:
    case = lab(DynamicBatching(), max_batch_size=max_batch_size)
    make_fast(case)
    submit(case, "a", "b", "c")
    assert (case.running, case.ahead) == ([["a"]], [["b"], ["c"]])


def make_slow(case: Lab) -> None:
    """Let the model show that an execution takes 2 ms."""
    for _ in range(8):
        submit(case, "warm")
        case.finish(infer_ns=2_000_000)


def test_a_slow_model_gets_its_next_batch_when_it_is_about_to_end_the_last_one() -> None:
    case = lab(DynamicBatching())
    make_slow(case)
    submit(case, "a")
    submit(case, "b")
    case.clock.advance(1_000_000)
    submit(case, "c")
    assert (case.running, case.ahead) == ([["a"]], [])
    case.clock.advance(900_000)
    assert case.ahead == [["b", "c"]], "the batch was formed as late as possible"
    submit(case, "d")
    case.clock.advance(900_000)
    assert case.ahead == [["b", "c"]]
    case.finish(infer_ns=2_000_000)
    case.clock.end_iteration()
    assert (case.running, case.ahead) == ([["b", "c"]], [])
    case.clock.advance(2_000_000)
    assert case.ahead == [], "it is not known how long two rows take"


def test_a_request_that_comes_when_the_instance_is_about_to_end_goes_to_it_at_once() -> None:
    case = lab(DynamicBatching())
    make_slow(case)
    submit(case, "a")
    case.clock.advance(1_900_000)
    submit(case, "b")
    assert case.ahead == [["b"]]


def test_a_delay_is_kept_before_an_instance_is_idle() -> None:
    case = lab(DynamicBatching(max_queue_delay_ns=1_000_000, delay_may_end_early=False))
    for _ in range(8):
        submit(case, "warm")
        case.clock.advance(1_000_000)
        case.finish(infer_ns=2_000_000)
    submit(case, "a")
    case.clock.advance(1_000_000)
    assert case.running == [["a"]]
    case.clock.advance(1_900_000)
    submit(case, "b")
    assert case.ahead == []
    case.clock.advance(1_000_000)
    assert case.ahead == [["b"]]


LIMITING = [
    DynamicBatching(priority_levels=2, default_priority_level=2),
    DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=9)),
    DynamicBatching(default_queue_policy=QueuePolicy(default_timeout_ns=10**9)),
]


@pytest.mark.parametrize("settings", LIMITING)
def test_nothing_of_a_slow_model_leaves_the_queue_early_where_its_rules_would_not_reach_it(
    settings: DynamicBatching,
) -> None:
    case = lab(settings)
    make_slow(case)
    submit(case, "a")
    submit(case, "b")
    case.clock.advance(3_000_000)
    assert (case.running, case.ahead) == ([["a"]], [])


@pytest.mark.parametrize("settings", LIMITING[:2])
def test_little_of_a_fast_model_goes_ahead_where_it_has_priorities_or_a_limit(settings: DynamicBatching) -> None:
    case = lab(settings, max_batch_size=0)
    make_fast(case)
    submit(case, *"abcdefgh")
    ahead = [request for batch in case.ahead for request in batch]
    assert case.running == [["a"]]
    assert ahead == list("bcdefgh")[: len(ahead)]
    assert 1 <= len(ahead) * case.instances.mean_execution_ns() <= FAST_EXECUTION_NS
    rest = list("bcdefgh")[len(ahead) :]
    assert rest, "some wait in the queue, where the rules reach them"


@pytest.mark.parametrize("settings", LIMITING[:2])
def test_a_batch_that_can_grow_goes_ahead_alone_where_it_has_priorities_or_a_limit(settings: DynamicBatching) -> None:
    case = lab(settings)
    make_fast(case)
    for id in "abcd":
        submit(case, id)
    assert (case.running, case.ahead) == ([["a"]], [["b"]])


def test_requests_that_can_expire_wait_in_the_queue_to_the_last() -> None:
    policy = QueuePolicy(default_timeout_ns=10**9, allow_timeout_override=True, max_queue_size=9)
    case = lab(DynamicBatching(default_queue_policy=policy), max_batch_size=0)
    make_fast(case)
    submit(case, "a", "b")
    assert (case.running, case.ahead) == ([["a"]], [])


# ---- the order of responses ---------------------------------------------------------------------------------------


def submit_to_one_sink(case: Lab, *ids: str) -> RecordingSink:
    sink = RecordingSink()
    for id in ids:
        request = case.request(id)
        request.sink = sink
        case.inbox.post(Submitted(request))
    case.clock.end_iteration()
    return sink


def test_responses_of_several_instances_keep_the_order_of_the_requests() -> None:
    case = lab(DynamicBatching(preserve_ordering=True), instances=2, max_batch_size=1)
    sink = submit_to_one_sink(case, "a", "b", "c")
    case.finish(1)
    case.clock.end_iteration()
    case.finish(1)
    assert sink.responses == []
    case.finish(0)
    assert [response.id for response in sink.responses] == ["a", "b", "c"]


def test_a_request_that_is_never_executed_does_not_wait_for_others() -> None:
    policy = QueuePolicy(default_timeout_ns=50 * US)
    case = lab(DynamicBatching(preserve_ordering=True, default_queue_policy=policy), max_batch_size=1)
    _, late = submit(case, "a", "b")
    case.clock.advance(50 * US)
    assert errors_of(late) == [errors.QueueTimeout]


def test_a_lost_instance_does_not_stop_the_responses_of_others() -> None:
    case = lab(DynamicBatching(preserve_ordering=True), instances=2, max_batch_size=1)
    sink = submit_to_one_sink(case, "a", "b")
    case.finish(1)
    assert sink.responses == []
    case.lose(0)
    assert [(response.id, type(response.error)) for response in sink.responses] == [
        ("a", errors.WorkerLost),
        ("b", type(None)),
    ]


# ---- clients ------------------------------------------------------------------------------------------------------


def submit_for(case: Lab, *clients: str) -> list[Request]:
    """Submit requests whose ids are the names of their clients."""
    requests = [case.request(client) for client in clients]
    for request in requests:
        request.parameters = {"tenant": request.id}
        case.inbox.post(Submitted(request))
    case.clock.end_iteration()
    return requests


def test_a_client_that_sends_much_does_not_keep_others_waiting() -> None:
    case = lab(DynamicBatching(), max_batch_size=2, fair=FairQueuing(parameter="tenant"))
    submit_for(case, *("a" * 10))
    submit_for(case, "b", "b")
    finish(case)
    assert case.running == [["b", "a"]]


def test_without_batching_clients_get_their_shares_too() -> None:
    case = lab(None, max_batch_size=4, fair=FairQueuing(parameter="tenant"))
    submit_for(case, "a", "a", "a", "b")
    ran = []
    while case.running:
        ran += case.running
        finish(case)
    assert ran == [["a"], ["b"], ["a"], ["a"]]


def test_a_client_above_its_quota_is_refused_until_a_response_of_it_has_come() -> None:
    case = lab(DynamicBatching(), max_batch_size=1, fair=FairQueuing(parameter="tenant", default_quota=2))
    *accepted, refused = submit_for(case, "a", "a", "b", "a")
    assert [errors_of(request) for request in accepted] == [[], [], []]
    assert errors_of(refused) == [errors.QuotaExceeded]
    finish(case)
    assert errors_of(submit_for(case, "a")[0]) == []


def test_requests_that_fail_in_the_queue_are_taken_from_the_quota() -> None:
    case = lab(DynamicBatching(), instances=0, fair=FairQueuing(parameter="tenant", default_quota=1))
    [first] = submit_for(case, "a")
    case.inbox.post(Cancelled(first))
    [second] = submit_for(case, "a")
    case.inbox.post(NoInstanceLeft(errors.Unavailable("gone")))
    assert [errors_of(first), errors_of(second)] == [[errors.RequestCancelled], [errors.Unavailable]]
    assert errors_of(submit_for(case, "a")[0]) == []


# ---- tests of batches ---------------------------------------------------------------------------------------------


def test_a_scheduler_can_wait_for_a_number_of_requests_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "3")
    case = lab(DynamicBatching(max_queue_delay_ns=US))
    submit(case, "a", "b")
    case.clock.advance(10**9)
    assert case.running == []
    submit(case, "c")
    assert case.running == [["a", "b", "c"]]
    finish(case)
    submit(case, "d")
    case.clock.advance(US)
    assert case.running == [["d"]]


@pytest.mark.parametrize("value", ["", "x", "-3", "0"])
def test_a_number_that_is_none_lets_the_scheduler_start_at_once(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    case = lab(DynamicBatching())
    submit(case, "a")
    assert case.running == [["a"]]


# ---- rules of packages --------------------------------------------------------------------------------------------


class Even(BatchingRule):
    """Lets only requests with even numbers share a batch."""

    made: list[Even] = []

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.open = 0
        self.finalized = False
        self.made.append(self)

    def initialize_batch(self) -> list[str]:
        self.open += 1
        return []

    def include_request(self, request: Request, batch: list[str]) -> bool:
        assert len(batch) <= 4
        batch.append(request.id)
        return int(request.id) % 2 == 0

    def finalize_batch(self, batch: list[str]) -> None:
        self.open -= 1

    def finalize(self) -> None:
        self.finalized = True


def test_a_rule_keeps_requests_out_of_a_batch_and_a_request_that_fits_no_batch_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("schedulers.batching_rules.extension", lambda group, name: Even)
    case = lab(DynamicBatching(), batching_rule="even")
    submit(case, "2", "4", "1", "3", "6", "8", "10", "12", "14")
    ran = []
    while case.running:
        ran += case.running
        finish(case)
    assert ran == [["2", "4"], ["1"], ["3"], ["6", "8", "10", "12"], ["14"]]
    rule = Even.made[-1]
    assert rule.open == 0
    case.inbox.close()
    assert rule.finalized


def test_a_rule_that_is_none_of_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedulers.batching_rules.extension", lambda group, name: dict)
    with pytest.raises(errors.ServingError, match="batching rule 'x' must be a subclass of .*; found "):
        lab(DynamicBatching(), batching_rule="x")


def test_many_queued_requests_fail_a_few_at_a_time_when_no_instance_is_left() -> None:
    case = lab(DynamicBatching(), instances=0)
    waiting = [case.request(str(number)) for number in range(1000)]
    for request in waiting:
        case.inbox.post(Submitted(request))
    case.clock.end_iteration()
    case.inbox.post(NoInstanceLeft(errors.Unavailable("gone")))
    case.inbox.post(Cancelled(waiting[900]))
    iterations, before = 0, 0
    while case.live.queued:
        failed = [request for request in waiting if request.finished]
        assert 0 < len(failed) - before <= FAILED_AT_ONCE + 1
        iterations, before = iterations + 1, len(failed)
        case.clock.end_iteration()
    assert iterations >= 1000 // FAILED_AT_ONCE
    texts = [
        error.message for request in waiting if isinstance(request.sink, RecordingSink) for error in request.sink.errors
    ]
    assert texts == ["gone"] * 900 + [errors.RequestCancelled().message] + ["gone"] * 99


def test_an_instance_that_comes_while_requests_fail_executes_the_others() -> None:
    case = lab(DynamicBatching(), instances=0)
    waiting = [case.request(str(number)) for number in range(FAILED_AT_ONCE + 5)]
    for request in waiting:
        case.inbox.post(Submitted(request))
    case.clock.end_iteration()
    case.inbox.post(NoInstanceLeft(errors.Unavailable("gone")))
    case.workers.append(FakeInstance("m_9"))
    case.instances.add(case.workers[0])
    case.clock.end_iteration()
    assert [request.finished for request in waiting] == [True] * FAILED_AT_ONCE + [False] * 5
    ran = []
    while case.running:
        ran += case.running[0]
        case.finish()
        case.clock.end_iteration()
    assert ran == [request.id for request in waiting[FAILED_AT_ONCE:]]


def test_thousands_of_requests_that_expire_together_fail_some_at_a_time_and_none_is_executed() -> None:
    case = lab(DynamicBatching(default_queue_policy=QueuePolicy(default_timeout_ns=50 * US)))
    submit(case, "running")
    case.clock.end_iteration()
    late = submit(case, *map(str, range(2 * EXPIRED_AT_ONCE)))
    case.clock.end_iteration()
    case.clock.time_ns += 50 * US
    case.finish()
    fresh = submit(case, "fresh")
    failed = sum(request.finished for request in late)
    assert failed == EXPIRED_AT_ONCE
    while failed < len(late):
        case.clock.end_iteration()
        before, failed = failed, sum(request.finished for request in late)
        assert 0 < failed - before <= EXPIRED_AT_ONCE
    assert {tuple(errors_of(request)) for request in late} == {(errors.QueueTimeout,)}
    case.clock.end_iteration()
    assert case.running == [["fresh"]]
    case.finish()
    assert not errors_of(fresh[0])
    case.check()
