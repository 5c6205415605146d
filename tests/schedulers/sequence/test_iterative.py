"""Iterative sequences: the model gives a request back, to execute it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import InvalidRequest
from kernel.serving.events import RequestRescheduled
from kernel.serving.sequences.sequence_instances import SequenceInstances
from tests.schedulers.sequence.sequence_lab import IDLE_NS, answered, errors, finish, rows, sequence_lab

if TYPE_CHECKING:
    from kernel.testing import Lab

both = pytest.mark.parametrize("oldest", [False, True], ids=["direct", "oldest"])


def reschedule(lab: Lab, row: int = 0) -> None:
    """Let the instance give a request of its batch back, and finish the batch."""
    batch = lab.workers[0].batches[0]
    request = batch.entries[row]
    assert request is not None
    assert isinstance(lab.instances, SequenceInstances)
    batch.reschedule(request)
    lab.instances.rescheduled(request)
    finish(lab)


@both
def test_a_request_without_an_id_is_a_sequence_until_the_model_is_done_with_it(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, iterative=True, has_state=True)
    request = lab.submit_to_sequence(0, id="r")
    assert rows(lab) == ["r"]
    assert request.sequence_start
    assert request.correlation_id == 1
    for _ in range(3):
        reschedule(lab)
        assert rows(lab) == ["r"]
        assert not request.sequence_start, "only the first execution has the flag"
        lab.clock.advance(2 * IDLE_NS)
    finish(lab)
    assert answered(request)
    assert len(lab.sequences) == 0
    assert lab.workers[0].ended_slots == [0]
    assert (lab.statistics.execution_count, lab.statistics.success.count) == (4, 1)
    assert lab.statistics.batches[1].count == 4
    lab.check()


@both
def test_a_sequence_with_an_id_ends_too_when_the_model_is_done(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, iterative=True)
    lab.submit_to_sequence(5, id="a", start=True)
    rows(lab)
    reschedule(lab)
    rows(lab)
    finish(lab)
    with pytest.raises(InvalidRequest, match="START flag"):
        lab.submit_to_sequence(5)
    lab.check()


@both
def test_rescheduled_requests_share_batches_with_new_ones(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, iterative=True)
    lab.submit_to_sequence(0, id="a")
    rows(lab)
    lab.submit_to_sequence(0, id="b")
    reschedule(lab)
    assert sorted(filter(None, rows(lab))) == ["a", "b"]
    finish(lab)
    lab.check()


@both
def test_a_rescheduled_request_whose_client_has_gone_is_not_executed_again(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, iterative=True)
    request = lab.submit_to_sequence(0, id="a")
    rows(lab)
    request.cancelled = True
    reschedule(lab)
    assert errors(request) == ["RequestCancelled"]
    assert rows(lab) == []
    assert len(lab.sequences) == 0
    lab.check()


@both
def test_the_end_flag_counts_when_the_model_is_done(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, iterative=True)
    request = lab.submit_to_sequence(5, id="a", start=True, end=True)
    rows(lab)
    reschedule(lab)
    assert rows(lab) == ["a"]
    finish(lab)
    assert answered(request)
    assert len(lab.sequences) == 0
    lab.check()


def test_a_request_of_a_sequence_that_is_over_fails() -> None:
    lab = sequence_lab(iterative=True)
    request = lab.submit_to_sequence(0, id="a")
    rows(lab)
    batch = lab.workers[0].batches[0]
    batch.reschedule(request)
    lab.live.returned([request])
    lab.sequences.clear()
    lab.inbox.post(RequestRescheduled(request))
    assert errors(request) == ["InternalError"]
