"""The strategy `oldest`: the oldest requests of all sequences, at most one of each."""

from __future__ import annotations

from tests.schedulers.sequence_lab import MS, finish, rows, sequence_lab


def test_a_batch_has_one_request_of_each_sequence_and_no_padding() -> None:
    lab = sequence_lab(oldest=True, preferred_batch_sizes=(4,), slots=8)
    for number in (1, 2, 3):
        lab.submit_to_sequence(number, id=f"{number}a", start=True)
        lab.submit_to_sequence(number, id=f"{number}b")
    assert rows(lab) == ["1a", "2a", "3a"]
    assert lab.workers[0].batches[0].slots == [0, 1, 2]
    finish(lab)
    assert rows(lab) == ["1b", "2b", "3b"]
    finish(lab)
    lab.submit_to_sequence(3, id="3c")
    assert rows(lab) == ["3c"]
    assert lab.workers[0].batches[0].slots == [2]
    finish(lab)
    lab.check()


def test_more_sequences_than_rows_take_turns() -> None:
    lab = sequence_lab(oldest=True, preferred_batch_sizes=(4,), slots=8)
    for number in range(1, 7):
        lab.submit_to_sequence(number, id=str(number), start=True)
    assert rows(lab) == ["1", "2", "3", "4"]
    finish(lab)
    assert rows(lab) == ["5", "6"]


def test_a_batch_waits_for_a_preferred_size_but_not_longer_than_the_delay() -> None:
    lab = sequence_lab(oldest=True, preferred_batch_sizes=(2,), max_queue_delay_ns=MS)
    lab.submit_to_sequence(1, id="1a", start=True)
    assert rows(lab) == []
    lab.submit_to_sequence(2, id="2a", start=True)
    assert rows(lab) == ["1a", "2a"]
    finish(lab)
    lab.submit_to_sequence(1, id="1b")
    lab.clock.advance(MS)
    assert rows(lab) == ["1b"]


def test_candidates_above_the_limit_wait_until_a_sequence_ends() -> None:
    lab = sequence_lab(oldest=True, slots=2)
    lab.submit_to_sequence(1, id="1a", start=True)
    lab.submit_to_sequence(2, id="2a", start=True)
    lab.submit_to_sequence(3, id="3a", start=True)
    assert rows(lab) == ["1a", "2a"]
    finish(lab)
    assert rows(lab) == []
    lab.submit_to_sequence(2, id="2b", end=True)
    assert rows(lab) == ["2b"]
    finish(lab)
    assert rows(lab) == ["3a"]
    assert lab.workers[0].batches[0].slots == [1]
    finish(lab)
    lab.check()
