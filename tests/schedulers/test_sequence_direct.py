"""The strategy `direct`: each sequence has a row of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.spec import SequenceBatching
from kernel.serving.live_sequences import Sequence
from schedulers.sequence_strategies import DirectBatches
from tests.schedulers.sequence_lab import MS, finish, rows, sequence_lab

if TYPE_CHECKING:
    import pytest


def test_a_sequence_keeps_its_row_and_rows_before_it_are_padding() -> None:
    lab = sequence_lab()
    for number in (1, 2, 3):
        lab.submit_to_sequence(number, id=f"{number}a", start=True)
    assert rows(lab) == ["1a", "2a", "3a"]
    finish(lab)
    lab.submit_to_sequence(3, id="3b")
    assert rows(lab) == [None, None, "3b"]
    assert lab.workers[0].batches[0].slots == [0, 1, 2]
    finish(lab)
    lab.submit_to_sequence(1, id="1b")
    assert rows(lab) == ["1b"], "a batch ends with the last row that has a request"
    finish(lab)
    lab.check()


def test_a_batch_waits_for_the_one_before_it() -> None:
    lab = sequence_lab()
    lab.submit_to_sequence(1, id="1a", start=True)
    assert rows(lab) == ["1a"]
    lab.submit_to_sequence(1, id="1b")
    lab.submit_to_sequence(2, id="2a", start=True)
    assert rows(lab) == ["1a"]
    finish(lab)
    assert rows(lab) == ["1b", "2a"]
    finish(lab)
    lab.check()


def test_requests_of_one_iteration_share_a_batch() -> None:
    lab = sequence_lab()
    lab.submit_to_sequence(1, id="a", start=True)
    assert not lab.workers[0].batches
    lab.submit_to_sequence(2, id="b", start=True)
    assert rows(lab) == ["a", "b"]


def test_requests_with_another_shape_wait_and_the_oldest_request_decides() -> None:
    lab = sequence_lab(dims=(-1,))
    lab.submit_to_sequence(1, id="1a", start=True, shape=[3])
    lab.submit_to_sequence(2, id="2a", start=True, shape=[3])
    lab.submit_to_sequence(3, id="3a", start=True, shape=[5])
    assert rows(lab) == ["1a", "2a"]
    lab.clock.advance(1)
    lab.submit_to_sequence(1, id="1b", shape=[3])
    finish(lab)
    assert rows(lab) == [None, None, "3a"], "the first row does not keep other shapes waiting for ever"
    finish(lab)
    assert rows(lab) == ["1b"]


def test_new_sequences_are_spread_over_the_instances() -> None:
    lab = sequence_lab(2)
    for number in (1, 2, 3, 4):
        lab.submit_to_sequence(number, id=str(number), start=True)
    assert (rows(lab, 0), rows(lab, 1)) == (["1", "3"], ["2", "4"])
    for worker in (0, 1):
        finish(lab, worker)
    lab.submit_to_sequence(4, id="4b")
    assert (rows(lab, 0), rows(lab, 1)) == ([], [None, "4b"])


def test_a_batch_waits_for_a_share_of_the_slots_but_not_longer_than_the_delay() -> None:
    lab = sequence_lab(minimum_slot_utilization=0.5, max_queue_delay_ns=2 * MS)
    lab.submit_to_sequence(1, id="1a", start=True)
    assert rows(lab) == []
    lab.clock.advance(1 * MS)
    assert rows(lab) == []
    lab.submit_to_sequence(2, id="2a", start=True)
    assert rows(lab) == ["1a", "2a"], "half of the four slots"
    finish(lab)
    lab.submit_to_sequence(2, id="2b")
    lab.clock.advance(2 * MS - 1)
    assert rows(lab) == []
    lab.clock.advance(1)
    assert rows(lab) == [None, "2b"]


def test_a_delay_without_a_share_of_slots_has_no_effect_and_the_other_way_round() -> None:
    for settings in ({"max_queue_delay_ns": MS}, {"minimum_slot_utilization": 1.0}):
        lab = sequence_lab(**settings)
        lab.submit_to_sequence(1, id="1a", start=True)
        assert rows(lab) == ["1a"]


def test_shape_tensors_that_are_not_in_the_message_share_no_batch() -> None:
    lab = sequence_lab()
    tensors = dict(lab.spec.inputs)
    tensors["IN"] = msgspec.structs.replace(tensors["IN"], is_shape_tensor=True)
    batches = DirectBatches(msgspec.structs.replace(lab.spec, inputs=tensors), SequenceBatching(slot_count=4), {})
    for slot in (0, 1):
        request = lab.request(str(slot))
        request.inputs[0].data = None
        batches.add(Sequence(slot, [request], slot=slot))
    first = batches.take(0)
    assert first is not None
    assert [request.id for request in first.requests] == ["0"]


def test_the_first_batch_waits_for_as_many_requests_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
    lab = sequence_lab()
    lab.submit_to_sequence(1, id="1a", start=True)
    lab.submit_to_sequence(2, id="2a", start=True)
    assert rows(lab) == []
    lab.submit_to_sequence(3, id="3a", start=True)
    assert rows(lab) == ["1a", "2a", "3a"]
    finish(lab)
    lab.submit_to_sequence(1, id="1b")
    assert rows(lab) == ["1b"]


def test_the_first_batch_waits_for_requests_without_a_slot_if_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "2")
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "2")
    lab = sequence_lab(slots=2)
    for number in (1, 2, 3):
        lab.submit_to_sequence(number, id=f"{number}a", start=True)
        assert rows(lab) == []
    lab.submit_to_sequence(1, id="1b")
    assert rows(lab) == [], "it belongs to a sequence with a slot"
    lab.submit_to_sequence(3, id="3b")
    assert rows(lab) == ["1a", "2a"]
    finish(lab)
    lab.check()


def test_without_the_other_variable_that_of_the_backlog_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "2")
    lab = sequence_lab()
    lab.submit_to_sequence(1, id="1a", start=True)
    assert rows(lab) == ["1a"]
