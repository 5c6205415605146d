"""The dynamic batcher as a scheduler, against a clock that moves when it is told to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel import errors
from kernel.config.spec import DynamicBatching, QueuePolicy
from kernel.serving.events import Cancelled, Submitted
from kernel.testing import Lab, RecordingSink, model_spec
from schedulers.dynamic.scheduler import dynamic

if TYPE_CHECKING:
    from kernel.serving.request import Request

US = 1000


def lab(settings: DynamicBatching, instances: int = 1, max_batch_size: int = 4, dims: tuple[int, ...] = (1,)) -> Lab:
    spec = model_spec(max_batch_size=max_batch_size, dims=dims, dynamic_batching=settings)
    return Lab(spec, dynamic, instances)


def submit(case: Lab, *ids: str, rows: int = 1) -> list[Request]:
    """Submit requests that come in one turn of the loop."""
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


def test_what_comes_in_one_turn_of_the_loop_runs_together() -> None:
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
