"""Without batching: first come, first served, one request an instance."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from kernel import errors
from kernel.serving.events import FAILED_AT_ONCE, Cancelled, NoInstanceLeft, Submitted
from kernel.serving.request import Request
from kernel.testing import FakeInstance, Lab, RecordingSink, model_spec
from schedulers.direct import direct

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


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
    assert [type(error) for error in waiting.sink.errors] == [errors.RequestCancelled]


def test_cancelled_requests_are_not_searched_among_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = 0

    def compare(one: Request, other: object) -> bool:
        nonlocal comparisons
        comparisons += 1
        return one is other

    monkeypatch.setattr(Request, "__eq__", compare)
    case = lab()
    waiting = [case.request(str(number)) for number in range(1000)]
    for request in waiting:
        case.inbox.post(Submitted(request))
    for request in waiting[1::3]:
        case.inbox.post(Cancelled(request))
    assert comparisons < 1000  # by dictionaries now and then
    ran = []
    while case.running:
        ran += case.running[0]
        case.finish()
    assert ran == [request.id for place, request in enumerate(waiting) if place % 3 != 1]


def test_no_request_gets_a_second_response_when_no_instance_is_left() -> None:
    case = lab(instances=0)
    cancelled, waiting = case.request("a"), case.request("b")
    for request in (cancelled, waiting):
        case.inbox.post(Submitted(request))
    case.inbox.post(Cancelled(cancelled))
    case.inbox.post(NoInstanceLeft(errors.Unavailable("gone")))
    sinks = [request.sink for request in (cancelled, waiting)]
    assert [[str(error) for error in sink.errors] for sink in sinks if isinstance(sink, RecordingSink)] == [
        [str(errors.RequestCancelled())],
        ["gone"],
    ]


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
    case.lose()
    assert case.running == []
    case.instances.add(worker)
    assert case.running == [["b"]]


def make_fast(case: Lab) -> None:
    """Let the model show that it is fast enough to be given work ahead of time."""
    for _ in range(8):
        case.inbox.post(Submitted(case.request("warm")))
        case.finish(infer_ns=10_000)


def test_a_slow_model_is_given_nothing_ahead_of_time() -> None:
    case = lab()
    for id in "abc":
        case.inbox.post(Submitted(case.request(id)))
        assert case.running == [["a"]]
    assert case.ahead == []


def test_a_slow_model_is_given_its_next_request_when_it_is_about_to_end_the_last_one() -> None:
    case = lab()
    for _ in range(8):
        case.inbox.post(Submitted(case.request("warm")))
        case.finish(infer_ns=2_000_000)
    for id in "abc":
        case.inbox.post(Submitted(case.request(id)))
    assert (case.running, case.ahead) == ([["a"]], [])
    case.clock.advance(1_000_000)
    assert case.ahead == []
    case.clock.advance(900_000)
    assert case.ahead == [["b"]]
    case.clock.advance(5_000_000)
    assert case.ahead == [["b"]], "the execution takes longer than expected"
    case.finish(infer_ns=2_000_000)
    assert (case.running, case.ahead) == ([["b"]], [])


def test_a_fast_model_is_given_requests_ahead_of_time() -> None:
    case = lab()
    make_fast(case)
    for id in "abc":
        case.inbox.post(Submitted(case.request(id)))
    assert (case.running, case.ahead) == ([["a"]], [["b"], ["c"]])


def test_one_slow_execution_ends_that() -> None:
    case = lab()
    make_fast(case)
    for id in "ab":
        case.inbox.post(Submitted(case.request(id)))
    case.finish(infer_ns=5_000_000)
    case.inbox.post(Submitted(case.request("c")))
    assert (case.running, case.ahead) == ([["b"]], [])


def test_a_model_that_calls_others_is_given_one_request_ahead_of_time() -> None:
    case = lab()
    case.instances.note_calls()
    make_fast(case)
    for id in "abc":
        case.inbox.post(Submitted(case.request(id)))
    assert (case.running, case.ahead) == ([["a"]], [["b"]])


def test_nothing_waits_behind_a_call_that_another_instance_could_execute() -> None:
    case = lab(instances=2)
    case.instances.note_calls()
    make_fast(case)
    for id in "abc":
        case.inbox.post(Submitted(case.request(id)))
    assert (sorted(case.running), case.ahead) == ([["a"], ["b"]], [])


def test_an_idle_instance_goes_first() -> None:
    case = lab(instances=2)
    make_fast(case)
    for id in "abc":
        case.inbox.post(Submitted(case.request(id)))
    assert sorted(case.running) == [["a"], ["b"]]
    assert case.ahead == [["c"]]


def test_requests_that_a_lost_instance_had_not_started_go_on_first_in_their_order() -> None:
    case = lab()
    make_fast(case)
    requests = [case.request(id) for id in "abcd"]
    for request in requests[:3]:
        case.inbox.post(Submitted(request))
    case.lose()
    case.inbox.post(Submitted(requests[3]))
    case.instances.add(case.workers[0])
    assert case.running + case.ahead == [["b"], ["c"], ["d"]]
    assert case.live.queued == 0


class CountedDeque(deque[Any]):
    """Counts the entries that are looked at."""

    looks = 0

    def popleft(self) -> Any:
        CountedDeque.looks += 1
        return super().popleft()

    def __iter__(self) -> Iterator[Any]:
        CountedDeque.looks += len(self)
        return super().__iter__()


def test_no_cancelled_request_makes_the_queue_look_at_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedulers.direct.deque", CountedDeque)
    case = lab()
    waiting = [case.request(str(number)) for number in range(1000)]
    for request in waiting:
        case.inbox.post(Submitted(request))
    most = 0
    for request in waiting[1:900]:
        before = CountedDeque.looks
        case.inbox.post(Cancelled(request))
        most = max(most, CountedDeque.looks - before)
    assert most <= 4
    case.finish()
    assert case.running == [[waiting[900].id]]


steps = st.lists(
    st.tuples(st.sampled_from(["submit", "cancel", "finish", "lose", "return"]), st.integers(0, 20)), max_size=80
)


@given(steps)
def test_the_order_is_that_of_a_list_from_which_cancelled_requests_are_removed(
    given_steps: list[tuple[str, int]],
) -> None:
    case = lab()
    expected: list[Request] = []
    running: list[Request] = []
    alive = True
    for number, (kind, amount) in enumerate(given_steps):
        if kind == "submit":
            for part in range(amount):
                expected.append(case.request(f"{number}.{part}"))
                case.inbox.post(Submitted(expected[-1]))
                running, expected = _started(running, expected) if alive else (running, expected)
        elif kind == "cancel":
            for _ in range(min(amount, len(expected))):
                case.inbox.post(Cancelled(expected.pop(amount % len(expected))))
        elif kind == "finish" and running:
            case.finish()
            running, expected = _started([], expected)
        elif kind == "lose" and alive:
            case.lose()
            running, alive = [], False
        elif kind == "return" and not alive:
            case.instances.add(case.workers[0])
            (running, expected), alive = _started([], expected), True
        assert case.running == ([[request.id for request in running]] if running else [])


def _started(running: list[Request], queued: list[Request]) -> tuple[list[Request], list[Request]]:
    return (running, queued) if running else (queued[:1], queued[1:])


def test_many_queued_requests_fail_a_few_at_a_time_when_no_instance_is_left() -> None:
    case = lab(instances=0)
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
    case = lab(instances=0)
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
