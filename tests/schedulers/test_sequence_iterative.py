"""Iterative sequences: the model gives a request back, to execute it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.errors import InvalidRequest, Unavailable
from kernel.serving.events import RequestRescheduled
from kernel.serving.sequence_model import SequenceInstances
from tests.schedulers.sequence_lab import IDLE_NS, answered, errors, finish, rows, sequence_lab

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
    assert request.correlation_id == 2**31 - 1
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


def shared_ids(lab: Lab) -> set[int | str]:
    """Return the ids that two sequences have at the same time."""
    ids = [each.id for each in lab.sequences]
    return {each for each in ids if ids.count(each) > 1}


@pytest.mark.parametrize("text", [False, True], ids=["number", "text"])
def test_our_id_of_a_sequence_moves_when_a_client_begins_one_with_it(text: bool) -> None:
    lab = sequence_lab(iterative=True, correlation_id_is_text=text)
    unnamed = lab.submit_to_sequence(0, id="unnamed")
    other = lab.submit_to_sequence(0, id="other")
    taken = unnamed.correlation_id
    lab.submit_to_sequence(int(taken), id="named", start=True)
    lab.check()
    assert shared_ids(lab) == set()
    assert len({str(taken), str(unnamed.correlation_id), str(other.correlation_id)}) == 3
    assert sorted(filter(None, rows(lab))) == ["named", "other", "unnamed"]
    finish(lab)
    assert answered(unnamed)
    lab.check()


def test_ids_that_a_model_with_short_ids_cannot_tell_apart_count_as_one() -> None:
    lab = sequence_lab(iterative=True, correlation_id_bits=32)
    unnamed = lab.submit_to_sequence(0, id="unnamed")
    taken = unnamed.correlation_id
    assert isinstance(taken, int)
    lab.submit_to_sequence(taken + (1 << 32), id="named", start=True)
    assert unnamed.correlation_id == taken - 1
    lab.check()


def test_a_client_cannot_begin_a_sequence_with_our_id_of_one_that_is_executed() -> None:
    lab = sequence_lab(iterative=True)
    unnamed = lab.submit_to_sequence(0, id="unnamed")
    taken = unnamed.correlation_id
    assert isinstance(taken, int)
    assert rows(lab) == ["unnamed"]
    for _ in range(2):
        with pytest.raises(Unavailable, match=rf"\[request id: named\].*{taken} .* begin the sequence with another ID"):
            lab.submit_to_sequence(taken, id="named", start=True)
        reschedule(lab)
        assert rows(lab) == ["unnamed"], "the model has its state under this id"
    assert unnamed.correlation_id == taken
    finish(lab)
    lab.submit_to_sequence(taken, id="named", start=True)
    assert rows(lab) == ["named"]
    lab.check()


def test_a_client_cannot_join_a_sequence_by_our_id() -> None:
    lab = sequence_lab(iterative=True)
    taken = lab.submit_to_sequence(0, id="unnamed").correlation_id
    assert isinstance(taken, int)
    with pytest.raises(InvalidRequest, match="START flag"):
        lab.submit_to_sequence(taken, id="guess")
    lab.check()


def test_we_give_no_id_of_a_sequence_that_has_its_end_and_is_still_executed() -> None:
    lab = sequence_lab(iterative=True)
    lab.submit_to_sequence(2**31 - 1, id="named", start=True, end=True)
    assert rows(lab) == ["named"]
    unnamed = lab.submit_to_sequence(0, id="unnamed")
    assert unnamed.correlation_id == 2**31 - 2
    lab.check()
