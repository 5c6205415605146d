"""The queue of a model: levels, limits, timeouts, and requests that are cancelled while they wait."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel.config.fair_queuing import FairQueuing
from kernel.config.spec import DynamicBatching, QueuePolicy
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from schedulers.queue import EXPIRED_AT_ONCE, RequestQueue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FAIR = FairQueuing(parameter="tenant")


def request(id: str, *, priority: int = 0, at_ns: int = 0, timeout_us: int = 0, tenant: str = "") -> Request:
    made = Request("m", [], RecordingSink(), id=id, parameters={"tenant": tenant})
    made.priority, made.queue_start_ns, made.timeout_us = priority, at_ns, timeout_us
    return made


def ids(requests: Iterable[Request]) -> str:
    return "".join(each.id for each in requests)


def waiting(queue: RequestQueue) -> str:
    queue.check()
    return ids(entry.request for entry in queue.in_order())


def test_levels_are_served_strictly_in_order_and_unknown_ones_have_the_default() -> None:
    queue = RequestQueue(DynamicBatching(priority_levels=3, default_priority_level=2))
    for id, priority in zip("abcdef", (3, 0, 1, 9, 2, 3), strict=True):
        queue.add(request(id, priority=priority), None)
    assert waiting(queue) == "cbdeaf"
    assert ids(queue.take(4)) == "cbde"


def test_without_levels_every_priority_is_the_same() -> None:
    queue = RequestQueue(DynamicBatching())
    for id, priority in zip("abc", (3, 1, 2), strict=True):
        queue.add(request(id, priority=priority), None)
    assert waiting(queue) == "abc"


def test_each_level_has_its_own_limit() -> None:
    settings = DynamicBatching(
        priority_levels=2, default_priority_level=2, default_queue_policy=QueuePolicy(max_queue_size=1),
        queue_policies={1: QueuePolicy(max_queue_size=2)},
    )  # fmt: skip
    queue = RequestQueue(settings)
    assert [queue.add(request("x", priority=1), None) for _ in range(3)] == [True, True, False]
    assert [queue.add(request("y", priority=2), None) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("fair", [None, FAIR])
def test_a_cancelled_request_makes_room_at_once(fair: FairQueuing | None) -> None:
    queue = RequestQueue(DynamicBatching(default_queue_policy=QueuePolicy(max_queue_size=2)), fair)
    first, second, third = request("a"), request("b"), request("c")
    assert queue.add(first, None)
    assert queue.add(second, None)
    assert not queue.add(third, None)
    assert queue.cancel(first)
    assert not queue.cancel(first)
    assert queue.add(third, None)
    assert waiting(queue) == "bc"
    assert ids(queue.take(5)) == "bc"
    assert queue.count == 0


def test_many_cancelled_requests_are_removed_though_none_is_served() -> None:
    queue = RequestQueue(DynamicBatching())
    queue.add(request("a"), None)
    for _ in range(1000):
        gone = request("x")
        queue.add(gone, None)
        queue.cancel(gone)
    assert len(queue._levels[0].in_time) < 100
    assert waiting(queue) == "a"


def test_only_a_shorter_timeout_of_the_request_counts_and_only_below_a_default() -> None:
    policy = QueuePolicy(default_timeout_ns=50_000, allow_timeout_override=True)
    for policy_given, timeout_us, expires_ns in (
        (policy, 10, 10_000),
        (policy, 90, 50_000),
        (policy, 0, 50_000),
        (QueuePolicy(allow_timeout_override=True), 10, None),  # Triton's rule
    ):
        queue = RequestQueue(DynamicBatching(default_queue_policy=policy_given))
        queue.add(request("a", timeout_us=timeout_us), None)
        assert queue.next_expiry_ns == expires_ns


@pytest.mark.parametrize("fair", [None, FAIR])
@pytest.mark.parametrize("delay", [False, True])
def test_expired_requests_are_rejected_or_go_behind_the_others_of_their_level(
    fair: FairQueuing | None, delay: bool
) -> None:
    policy = QueuePolicy(default_timeout_ns=10, delay_on_timeout=delay)
    queue = RequestQueue(DynamicBatching(default_queue_policy=policy), fair)
    old, gone = request("a"), request("b")
    for each in (old, gone, request("c", at_ns=5)):
        queue.add(each, None)
    queue.cancel(gone)
    assert ids(queue.expire(9)) == ""
    assert ids(queue.expire(10)) == ("" if delay else "a")
    assert waiting(queue) == ("ca" if delay else "c")
    assert queue.next_expiry_ns == 15
    if delay:
        assert queue.cancel(old)
        assert waiting(queue) == "c"


class Unsearched(deque[Any]):
    """May not be looked through."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("all entries are looked at")


@pytest.mark.parametrize("delay", [False, True])
def test_requests_that_expire_one_after_the_other_are_not_searched(delay: bool) -> None:
    policy = QueuePolicy(default_timeout_ns=10**9, allow_timeout_override=True, delay_on_timeout=delay)
    queue = RequestQueue(DynamicBatching(default_queue_policy=policy))
    requests = [request(str(number), timeout_us=1 + number) for number in range(1000)]
    queue.add(requests[0], None)
    level = queue._levels[0]
    level.in_time = Unsearched(level.in_time.popleft() for _ in range(1))
    level.orders = (level.in_time, level.delayed)
    for each in requests[1:]:
        queue.add(each, None)
    for number, each in enumerate(requests[:900]):
        assert queue.next_expiry_ns == 1000 * (1 + number)
        assert queue.expire(1000 * (1 + number)) == ([] if delay else [each])
    assert queue.count == (1000 if delay else 100)
    assert ids(queue.take(100)) == ids(requests[900:])
    queue.check()


def test_thousands_of_requests_expire_some_at_a_time() -> None:
    queue = RequestQueue(DynamicBatching(default_queue_policy=QueuePolicy(default_timeout_ns=10)))
    requests = [request(str(number)) for number in range(2 * EXPIRED_AT_ONCE + 1)]
    for each in requests:
        queue.add(each, None)
    expired = []
    while queue.next_expiry_ns is not None:
        found = queue.expire(10)
        assert 0 < len(found) <= EXPIRED_AT_ONCE
        expired += found
        queue.check()
    assert expired == requests


@pytest.mark.parametrize("fair", [None, FAIR])
def test_expiries_of_requests_that_were_cancelled_do_not_stay(fair: FairQueuing | None) -> None:
    queue = RequestQueue(DynamicBatching(default_queue_policy=QueuePolicy(default_timeout_ns=10**9)), fair)
    requests = [request(str(number)) for number in range(5000)]
    for each in requests:
        queue.add(each, None)
    for each in requests:
        assert queue.cancel(each)
    queue.check()


def test_expiries_of_requests_that_were_executed_do_not_stay() -> None:
    policy = QueuePolicy(default_timeout_ns=10**9, allow_timeout_override=True)
    queue = RequestQueue(DynamicBatching(default_queue_policy=policy))
    queue.add(request("first", timeout_us=1), None)
    for number in range(5000):
        queue.add(request(str(number)), None)
        queue.put_back(queue.take(1)[0], None)
        assert len(queue.take(1)) == 1
        queue.check()


steps = st.lists(
    st.tuples(st.sampled_from(["add", "cancel", "take", "expire", "return"]), st.integers(0, 9), st.integers(0, 3)),
    max_size=60,
)


@given(steps, st.booleans(), st.sampled_from([None, FAIR]))
def test_nothing_is_lost_or_served_twice(
    given_steps: list[tuple[str, int, int]], delay: bool, fair: FairQueuing | None
) -> None:
    policy = QueuePolicy(default_timeout_ns=7, delay_on_timeout=delay, max_queue_size=20)
    settings = DynamicBatching(priority_levels=2, default_priority_level=1, default_queue_policy=policy)
    queue = RequestQueue(settings, fair)
    present: dict[str, Request] = {}
    taken: list[Request] = []
    for now_ns, (kind, amount, priority) in enumerate(given_steps):
        if kind == "add":
            made = request(f"{now_ns},", priority=priority, at_ns=now_ns, tenant=str(amount % 3))
            if queue.add(made, None):
                present[made.id] = made
        elif kind == "cancel" and present:
            chosen = list(present)[amount % len(present)]
            assert queue.cancel(present.pop(chosen))
        elif kind == "take":
            shown = [entry.request.id for entry in queue.in_order()]
            taken = queue.take(amount)
            assert [each.id for each in taken] == shown[:amount]
            for each in taken:
                del present[each.id]
        elif kind == "expire":
            for each in queue.expire(now_ns):
                assert not delay
                del present[each.id]
        elif kind == "return":
            for each in reversed(taken):
                queue.put_back(each, None)
                present[each.id] = each
            taken = []
        queue.check()
        assert {entry.request.id for entry in queue.in_order()} == present.keys()


@given(steps, st.booleans())
def test_the_order_is_that_of_lists_from_which_cancelled_requests_are_removed(
    given_steps: list[tuple[str, int, int]], delay: bool
) -> None:
    policy = QueuePolicy(default_timeout_ns=20, delay_on_timeout=delay)
    queue = RequestQueue(DynamicBatching(default_queue_policy=policy))
    in_time: list[Request] = []
    delayed: list[Request] = []
    taken: list[Request] = []
    for now_ns, (kind, amount, _) in enumerate(given_steps):
        if kind == "add":
            added = [request(f"{now_ns}.{part},", at_ns=now_ns) for part in range(amount)]
            for each in added:
                queue.add(each, None)
            in_time += added
        elif kind == "cancel" and in_time + delayed:
            gone = (in_time + delayed)[amount * 7 % len(in_time + delayed)]
            assert queue.cancel(gone)
            (in_time if gone in in_time else delayed).remove(gone)
        elif kind == "take":
            both = in_time + delayed
            taken, left = both[:amount], both[amount:]
            assert queue.take(amount) == taken
            in_time, delayed = [each for each in in_time if each in left], [each for each in delayed if each in left]
        elif kind == "expire":
            expired = [each for each in in_time if each.queue_start_ns + 20 <= now_ns]
            assert queue.expire(now_ns) == ([] if delay else expired)
            in_time = [each for each in in_time if each not in expired]
            delayed += expired if delay else []
        elif kind == "return":
            for each in reversed(taken):
                queue.put_back(each, None)
            in_time, taken = taken + in_time, []
        queue.check()
        assert [entry.request for entry in queue.in_order()] == in_time + delayed


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
    monkeypatch.setattr("schedulers.queue.deque", CountedDeque)
    queue = RequestQueue(DynamicBatching())
    queued = [request(str(number)) for number in range(1000)]
    for each in queued:
        queue.add(each, None)
    for each in queued[:900]:
        before = CountedDeque.looks
        assert queue.cancel(each)
        assert CountedDeque.looks - before <= 4
    entries = sum(map(len, queue._levels[0].orders))
    assert entries <= 200, "100 requests and at most as many that were cancelled"
    assert [each.id for each in queue.take(1000)] == [each.id for each in queued[900:]]
