"""Which requests of a lost worker are executed again, and when one is found to have ended it."""

from __future__ import annotations

from kernel.isolation.suspects import MOST_LOSSES, judge
from kernel.serving.batch import BegunBatch
from kernel.serving.request import NO_SINK, Request


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
