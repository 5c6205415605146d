"""Requests that have ended workers are remembered by what they contain, and equal ones are refused.

Which requests of a lost worker are executed again, and when one is found to have ended it.
"""

from __future__ import annotations

import pytest

from kernel.errors import PoisonRequest
from kernel.serving import poison
from kernel.serving.batch import BegunBatch
from kernel.serving.poison import MOST_LOSSES, PoisonGuard, judge
from kernel.serving.request import NO_SINK, Request
from shm.tensor import ClientSpan, Tensor


def request(content: bytes = b"abcd", id: str = "") -> Request:
    return Request("model", [Tensor("IN", "FP32", [1], content)], NO_SINK, id=id)


def found(guard: PoisonGuard, *requests: Request) -> None:
    for each in requests:
        for _ in range(2):
            guard.judge([BegunBatch([each], True)])


def test_an_equal_request_is_refused_whatever_its_id_and_another_is_not() -> None:
    guard = PoisonGuard("model")
    assert not guard.remembers
    guard.check(request())
    found(guard, request(id="first"))
    assert guard.remembers
    with pytest.raises(PoisonRequest, match="has ended workers of model 'model' before"):
        guard.check(request(id="second"))
    guard.check(request(b"abce"))
    guard.check(Request("model", [Tensor("OTHER", "FP32", [1], b"abcd")], NO_SINK))
    assert (guard.found_count, guard.refused_count) == (1, 1)


def test_no_digest_is_computed_of_a_request_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = PoisonGuard("model")
    found(guard, request())

    def unwanted(*_: object) -> None:
        raise AssertionError("a digest was computed")

    monkeypatch.setattr(poison, "digest", unwanted)
    guard.check(Request("model", [Tensor("IN", "FP32", [2], b"abcdabcd")], NO_SINK))


def test_what_is_remembered_is_bounded_and_can_be_cleared() -> None:
    guard = PoisonGuard("model")
    found(guard, *(request(number.to_bytes(4)) for number in range(poison.MOST_REMEMBERED + 1)))
    assert len(guard) == poison.MOST_REMEMBERED
    guard.check(request((0).to_bytes(4)))
    with pytest.raises(PoisonRequest):
        guard.check(request((1).to_bytes(4)))
    assert guard.clear() == poison.MOST_REMEMBERED
    guard.check(request((1).to_bytes(4)))


def test_large_requests_and_those_with_regions_of_clients_are_not_remembered() -> None:
    guard = PoisonGuard("model")
    large = Request("model", [Tensor("IN", "FP32", [1], bytes(poison.MOST_BYTES + 1))], NO_SINK)
    client_span = ClientSpan("region", 0, 4)
    in_region = Request("model", [Tensor("IN", "FP32", [1], None, None, client_span)], NO_SINK)
    found(guard, large, in_region)
    assert not guard.remembers
    assert guard.found_count == 2


def requests(count: int) -> list[Request]:
    return [Request("m", [], NO_SINK) for _ in range(count)]


def test_all_requests_of_a_batch_are_executed_again_and_the_one_that_is_lost_alone_is_the_culprit() -> None:
    batch = requests(4)
    found = judge([BegunBatch(batch, True)])
    assert (found.again, found.culprit) == (batch, None)
    found = judge([BegunBatch(batch[2:3], True)])
    assert (found.again, found.culprit) == ([], batch[2])


def test_the_first_worker_that_is_lost_with_a_single_request_makes_nobody_a_culprit() -> None:
    [request] = requests(1)
    found = judge([BegunBatch([request], True)])
    assert (found.again, found.culprit) == ([request], None)
    assert judge([BegunBatch([request], True)]).culprit is request


def test_what_may_have_been_noticed_outside_of_the_worker_is_not_executed_again() -> None:
    seen, unseen = requests(2)
    assert judge([BegunBatch([seen], False), BegunBatch([unseen], True)]).again == [unseen]
    found = judge([BegunBatch([seen], False)])
    assert (found.again, found.culprit) == ([], None), "nobody is a culprit whose response may have been sent"


def test_a_request_that_is_lost_with_other_batches_is_no_culprit_and_is_not_tried_for_ever() -> None:
    [request] = requests(1)
    for _ in range(MOST_LOSSES - 1):
        found = judge([BegunBatch([request], True), BegunBatch(requests(1), True)])
        assert request in found.again
    found = judge([BegunBatch([request], True), BegunBatch(requests(1), True)])
    assert request not in found.again
    assert found.culprit is None


def test_a_request_whose_client_has_left_is_not_executed_again() -> None:
    first, second = requests(2)
    first.cancelled = True
    assert judge([BegunBatch([first, second], True)]).again == [second]
