"""Requests of clients that have left, cancelled in pieces."""

from __future__ import annotations

import functools

from kernel.errors import RequestCancelled
from kernel.loop.cancellations import MOST_AT_ONCE, MOST_WAITING
from kernel.serving.request import Request
from kernel.testing import RecordingSink
from schedulers.testing import KernelLab, spec_of
from tests.leased_tensor import leased_tensor


def with_queued(count: int) -> tuple[KernelLab, list[Request], list[RecordingSink], list[int]]:
    """Return a lab whose model executes nothing, `count` requests that it has queued, and whose inputs were freed."""
    lab = KernelLab()
    model = lab.add(spec_of("m", "IN", "OUT"))
    model.instances.retire(lab.instances["m"])
    freed: list[int] = []
    requests, sinks = [], []
    for number in range(count):
        sink = RecordingSink()
        tensor = leased_tensor("IN", "FP32", [1], bytes(4), functools.partial(freed.append, number))
        request = Request("m", [tensor], sink, leased=True)
        lab.kernel.submit(request)
        requests.append(request)
        sinks.append(sink)
    return lab, requests, sinks, freed


def test_a_few_requests_are_cancelled_at_once() -> None:
    lab, requests, sinks, _ = with_queued(3)
    for request in requests:
        lab.kernel.cancel(request)
    assert [type(error) for sink in sinks for error in sink.errors] == [RequestCancelled] * 3


def test_many_are_cancelled_in_several_iterations_the_oldest_first_and_each_gets_one_final_response() -> None:
    count = MOST_AT_ONCE + 2 * MOST_WAITING + 1
    lab, requests, sinks, freed = with_queued(count)
    lab.kernel.cancel(*requests)
    done = [MOST_AT_ONCE, MOST_AT_ONCE + MOST_WAITING, count - 1, count, count]
    for expected in done:
        assert [len(sink.responses) for sink in sinks] == [1] * expected + [0] * (count - expected)
        assert freed == list(range(expected))
        assert lab.kernel.in_flight == count - expected
        lab.check()
        lab.clock.end_iteration()


def test_requests_cancelled_one_by_one_are_spread_as_well() -> None:
    count = MOST_AT_ONCE + 5
    lab, requests, sinks, _ = with_queued(count)
    for request in requests:
        lab.kernel.cancel(request)
    assert sum(len(sink.responses) for sink in sinks) == MOST_AT_ONCE
    lab.clock.end_iteration()
    assert [len(sink.responses) for sink in sinks] == [1] * count


def test_an_iteration_cancels_only_for_a_short_time() -> None:
    count = MOST_AT_ONCE + 10
    lab, requests, sinks, _ = with_queued(count)
    lab.kernel.cancel(*requests)
    for sink in sinks:
        original = sink.send

        def send(response: object, original: object = original) -> None:
            original(response)  # type: ignore[operator]
            lab.clock.time_ns += 1_000_000

        sink.send = send  # type: ignore[method-assign]
    for expected in range(1, 11):
        lab.clock.end_iteration()
        assert sum(len(sink.responses) for sink in sinks) == MOST_AT_ONCE + expected


def test_what_ends_before_its_turn_is_not_cancelled() -> None:
    lab, requests, sinks, _ = with_queued(MOST_AT_ONCE + 1)
    lab.kernel.cancel(*requests)
    requests[-1].fail(RequestCancelled())
    lab.clock.end_iteration()
    assert len(sinks[-1].responses) == 1
    assert not requests[-1].cancelled
    lab.check()


def test_new_requests_are_cancelled_at_once_when_none_waits_any_more() -> None:
    lab, requests, sinks, _ = with_queued(MOST_AT_ONCE + 2)
    lab.kernel.cancel(*requests[:-1])
    lab.clock.end_iteration()
    lab.clock.end_iteration()
    lab.kernel.cancel(requests[-1])
    assert len(sinks[-1].responses) == 1
