"""The record of live requests: each is queued, or one instance has it, until its final response."""

from __future__ import annotations

import pytest

from kernel.errors import InternalError
from kernel.serving.batch import Batch
from kernel.serving.live_requests import LiveRequests
from kernel.serving.request import Request
from kernel.testing import FakeInstance, RecordingSink

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
