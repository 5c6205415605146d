"""How sequences begin and end: flags, idle time, cancellation, a backlog, lost instances. Both strategies."""

from __future__ import annotations

import pytest

from kernel.errors import InvalidRequest, Unavailable
from kernel.serving.events import FAILED_AT_ONCE, Cancelled, InstanceIdle, NoInstanceLeft
from kernel.testing import FakeInstance
from schedulers.sequence_batcher import ENDED_AT_ONCE
from tests.schedulers.sequence_lab import IDLE_NS, MS, answered, errors, finish, rows, sequence_lab, texts

both = pytest.mark.parametrize("oldest", [False, True], ids=["direct", "oldest"])


@both
def test_the_first_request_needs_the_start_flag(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest)
    with pytest.raises(InvalidRequest) as refused:
        lab.submit_to_sequence(42)
    assert refused.value.message == (
        "inference request for sequence 42 to model 'model' must specify the START flag on the first request of the "
        "sequence"
    )
    lab.check()


@both
def test_after_its_end_a_sequence_is_unknown_and_its_slot_is_free(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, slots=1, has_state=True)
    lab.submit_to_sequence("s", id="first", start=True)
    lab.submit_to_sequence("s", id="last", end=True)
    with pytest.raises(InvalidRequest, match="START flag"):
        lab.submit_to_sequence("s")
    next_one = lab.submit_to_sequence("s", id="new", start=True, end=True)
    for id in ("first", "last", "new"):
        assert rows(lab) == [id], "the same id again is another sequence, which waits for the slot"
        finish(lab)
    assert answered(next_one)
    assert lab.workers[0].ended_slots == [0, 0]
    assert len(lab.sequences) == 0
    lab.check()


@both
def test_start_of_a_sequence_that_lives_restarts_it_in_its_slot(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest)
    lab.submit_to_sequence(1, id="a", start=True)
    rows(lab)
    finish(lab)
    again = lab.submit_to_sequence(1, id="b", start=True)
    assert rows(lab) == ["b"]
    assert again.sequence_start
    assert len(lab.sequences) == 1
    finish(lab)
    lab.check()


@both
def test_a_sequence_without_requests_ends_after_its_idle_time(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, slots=1, has_state=True)
    lab.submit_to_sequence(1, id="a", start=True)
    lab.submit_to_sequence(2, id="b", start=True)
    rows(lab)
    lab.clock.advance(2 * IDLE_NS)
    finish(lab)
    lab.clock.advance(IDLE_NS - 1)
    assert lab.sequences.has(1), "the time begins when its last request is finished"
    lab.clock.advance(2)
    assert not lab.sequences.has(1)
    assert rows(lab) == ["b"], "the slot is the next one's, which did not idle in the backlog"
    assert lab.workers[0].ended_slots == [0]
    with pytest.raises(InvalidRequest, match="START flag"):
        lab.submit_to_sequence(1)
    finish(lab)
    lab.check()


@both
def test_a_request_within_the_idle_time_keeps_the_sequence(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest)
    for number in range(5):
        lab.submit_to_sequence(1, start=number == 0)
        rows(lab)
        finish(lab)
        lab.clock.advance(IDLE_NS - MS)
        assert lab.sequences.has(1)
    lab.check()


@both
def test_a_queued_request_that_is_cancelled_ends_its_sequence(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, slots=1)
    running = lab.submit_to_sequence(1, id="running", start=True)
    rows(lab)
    queued = lab.submit_to_sequence(1, id="queued")
    other = lab.submit_to_sequence(1, id="other")
    backlog = lab.submit_to_sequence(2, id="backlog", start=True)
    lab.inbox.post(Cancelled(queued))
    assert (errors(queued), errors(other)) == (["RequestCancelled"], ["RequestCancelled"])
    assert not lab.sequences.has(1)
    assert rows(lab) == ["running"]
    finish(lab)
    assert answered(running)
    assert rows(lab) == ["backlog"]
    lab.inbox.post(Cancelled(backlog))  # too late: it is executing
    finish(lab)
    assert answered(backlog)
    lab.check()


@both
def test_a_cancelled_request_in_the_backlog_ends_its_sequence(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, slots=1)
    lab.submit_to_sequence(1, id="running", start=True)
    rows(lab)
    waiting = lab.submit_to_sequence(2, start=True)
    third = lab.submit_to_sequence(3, id="third", start=True)
    lab.inbox.post(Cancelled(waiting))
    assert errors(waiting) == ["RequestCancelled"]
    lab.submit_to_sequence(1, id="end", end=True)
    finish(lab)
    finish(lab)
    assert rows(lab) == ["third"]
    finish(lab)
    assert answered(third)
    lab.check()


@both
def test_requests_that_time_out_in_the_backlog_fail_with_their_sequence(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest, slots=1)
    lab.submit_to_sequence(1, id="running", start=True, timeout_us=1)
    rows(lab)
    first = lab.submit_to_sequence(2, start=True, timeout_us=5000)
    second = lab.submit_to_sequence(2, timeout_us=2000)
    patient = lab.submit_to_sequence(3, id="patient", start=True)
    lab.clock.advance(2 * MS - 1)
    assert not first.finished
    lab.clock.advance(1)
    assert texts(first) == texts(second) == ["timeout of the corresponding sequence has been expired"]
    assert not lab.sequences.has(2)
    assert lab.statistics.failures["REJECTED"] == 0, "the laboratory counts no failures"
    lab.submit_to_sequence(1, id="end", end=True)
    finish(lab)
    finish(lab)
    assert rows(lab) == ["patient"]
    finish(lab)
    assert answered(patient)
    lab.check()


@both
def test_a_lost_instance_ends_its_sequences(oldest: bool) -> None:
    lab = sequence_lab(2, oldest=oldest, slots=1)
    running = lab.submit_to_sequence(1, id="1a", start=True)
    other = lab.submit_to_sequence(2, id="2a", start=True)
    queued = lab.submit_to_sequence(1, id="1b")
    rows(lab)
    lab.lose(0)
    lab.clock.end_iteration()
    assert errors(running) == ["WorkerLost"]
    assert errors(queued) == ["SequenceLost"]
    with pytest.raises(InvalidRequest, match="START flag"):
        lab.submit_to_sequence(1)
    finish(lab, 1)
    assert answered(other)
    lab.submit_to_sequence(2, id="2b")
    assert rows(lab, 1) == ["2b"], "sequences of other instances go on"
    finish(lab, 1)
    lab.check()


@both
def test_an_idle_sequence_ends_with_its_instance(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest)
    lab.submit_to_sequence(1, start=True)
    rows(lab)
    finish(lab)
    lab.lose()
    assert not lab.sequences.has(1)
    lab.clock.advance(2 * IDLE_NS)
    lab.check()


@both
def test_a_sequence_of_which_nothing_was_executed_begins_in_another_instance(oldest: bool) -> None:
    lab = sequence_lab(2, oldest=oldest, slots=4)
    lab.submit_to_sequence(1, id="1a", start=True)
    rows(lab)
    lab.submit_to_sequence(2, id="2a", start=True)
    lab.submit_to_sequence(3, id="3a", start=True)
    assert rows(lab, 1) == ["2a"]
    lab.lose(0)
    lab.clock.end_iteration()
    assert errors(lab.submit_to_sequence(3, id="3b")) == []
    finish(lab, 1)
    assert "3a" in rows(lab, 1)
    lab.check()


@both
def test_without_any_instance_queued_requests_fail_and_new_sequences_can_begin_later(oldest: bool) -> None:
    lab = sequence_lab(0, oldest=oldest)
    waiting = lab.submit_to_sequence(1, start=True)
    lab.clock.end_iteration()
    lab.inbox.post(NoInstanceLeft(Unavailable("it does not start")))
    assert texts(waiting) == ["it does not start"]
    later = lab.submit_to_sequence(1, id="later", start=True)
    lab.clock.end_iteration()
    lab.workers.append(FakeInstance("m_9"))
    lab.instances.add(lab.workers[0])
    assert rows(lab) == ["later"]
    finish(lab)
    assert answered(later)
    lab.check()


@both
@pytest.mark.parametrize("requests", [1, 300])
def test_many_sequences_and_requests_fail_a_few_at_a_time_when_no_instance_is_left(oldest: bool, requests: int) -> None:
    lab = sequence_lab(0, oldest=oldest)
    waiting = [
        lab.submit_to_sequence(number, start=not part)
        for number in range(1, 1 + 600 // requests)
        for part in range(requests)
    ]
    lab.clock.end_iteration()
    lab.inbox.post(NoInstanceLeft(Unavailable("it does not start")))
    for failed in range(FAILED_AT_ONCE, 600, FAILED_AT_ONCE):
        assert sum(request.finished for request in waiting) == failed
        lab.check()
        lab.clock.end_iteration()
    assert [texts(request) for request in waiting] == [["it does not start"]] * 600
    later = lab.submit_to_sequence(1, id="later", start=True)
    lab.workers.append(FakeInstance("m_9"))
    lab.instances.add(lab.workers[0])
    assert rows(lab) == ["later"]
    finish(lab)
    assert answered(later)
    lab.check()


@both
def test_an_instance_that_comes_while_sequences_are_ended_serves_the_others(oldest: bool) -> None:
    lab = sequence_lab(0, oldest=oldest)
    waiting = [lab.submit_to_sequence(number, id=str(number), start=True) for number in range(1, FAILED_AT_ONCE + 2)]
    lab.clock.end_iteration()
    lab.inbox.post(NoInstanceLeft(Unavailable("it does not start")))
    lab.workers.append(FakeInstance("m_9"))
    lab.instances.add(lab.workers[0])
    assert rows(lab) == [str(FAILED_AT_ONCE + 1)]
    finish(lab)
    assert answered(waiting[-1])
    lab.check()


@both
def test_a_retired_instance_serves_its_sequences_and_gets_no_new_ones(oldest: bool) -> None:
    lab = sequence_lab(2, oldest=oldest)
    lab.submit_to_sequence(1, start=True)
    rows(lab)
    finish(lab)
    lab.instances.retire(lab.workers[0])
    lab.submit_to_sequence(1, id="1b", end=True)
    lab.submit_to_sequence(2, id="2a", start=True)
    lab.submit_to_sequence(3, id="3a", start=True)
    assert (rows(lab, 0), rows(lab, 1)) == (["1b"], ["2a", "3a"])
    finish(lab, 0)
    assert lab.sequences.on(lab.workers[0]) == 0
    finish(lab, 1)
    lab.check()


@both
def test_requests_wait_for_an_instance_that_is_stopped_for_a_while(oldest: bool) -> None:
    lab = sequence_lab(2, oldest=oldest)
    lab.submit_to_sequence(1, start=True)
    rows(lab)
    finish(lab)
    lab.instances.set_apart(lab.workers[0])
    lab.submit_to_sequence(1, id="1b")
    lab.clock.advance(5 * IDLE_NS)
    assert (rows(lab, 0), rows(lab, 1)) == ([], [])
    lab.instances.add(lab.workers[0])
    lab.inbox.post(InstanceIdle(lab.workers[0]))
    assert rows(lab) == ["1b"]
    finish(lab)
    lab.check()


def test_requests_have_one_row_and_a_correlation_id() -> None:
    lab = sequence_lab()
    with pytest.raises(InvalidRequest) as missing:
        lab.submit_to_sequence(0, start=True)
    assert missing.value.message == (
        "inference request to model 'model' must specify a non-zero or non-empty correlation ID"
    )
    request = lab.request("", rows=2)
    request.correlation_id, request.sequence_start = 1, True
    with pytest.raises(InvalidRequest) as large:
        lab.sequences.admit(request)
    assert large.value.message == (
        "inference request to model 'model' must specify batch-size 1 due to requirements of sequence batcher"
    )
    request.fail(large.value)
    lab.check()


@both
def test_the_requests_of_a_long_sequence_that_is_cancelled_fail_a_few_at_a_time(oldest: bool) -> None:
    lab = sequence_lab(oldest=oldest)
    first = lab.submit_to_sequence(1, id="first", start=True)
    assert rows(lab) == ["first"]
    waiting = [lab.submit_to_sequence(1) for _ in range(600)]
    other = lab.submit_to_sequence(2, id="other", start=True)
    lab.clock.end_iteration()
    lab.inbox.post(Cancelled(waiting[300]))
    lab.inbox.post(Cancelled(waiting[301]))
    for failed in range(0, 600, FAILED_AT_ONCE):
        assert sum(request.finished for request in waiting) == failed
        lab.check()
        lab.clock.end_iteration()
    assert {tuple(errors(request)) for request in waiting} == {("RequestCancelled",)}
    while lab.workers[0].batches:
        finish(lab)
    assert answered(first)
    assert answered(other)
    lab.check()


@both
def test_thousands_of_sequences_whose_time_is_over_end_a_few_at_a_time(oldest: bool) -> None:
    lab = sequence_lab(0, oldest=oldest)
    waiting = [lab.submit_to_sequence(number, start=True, timeout_us=5) for number in range(1, 2 * ENDED_AT_ONCE + 1)]
    lab.clock.end_iteration()
    lab.clock.time_ns += 5_000
    waiting.append(lab.submit_to_sequence(1 << 20, start=True, timeout_us=5))
    lab.clock.end_iteration()
    assert len(lab.sequences) == ENDED_AT_ONCE + 1
    lab.clock.time_ns += 5_000
    while lab.sequences:
        lab.clock.advance(1)
        lab.clock.end_iteration()
    for _ in range(2 * ENDED_AT_ONCE // FAILED_AT_ONCE):
        lab.clock.end_iteration()
    assert all(request.finished for request in waiting)
    lab.check()
