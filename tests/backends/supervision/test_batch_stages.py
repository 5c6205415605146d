"""How far a worker was with its batches, and which of its work can stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from backends.supervision.batch_stages import Stage, batch_stages, work_marks
from backends.transport.outbox import Progress
from backends.transport.wire import CREDIT_WINDOW
from kernel.serving.batch import Batch
from kernel.serving.instance import BatchRecord
from kernel.serving.request import Request
from kernel.testing import RecordingSink

if TYPE_CHECKING:
    from collections.abc import Hashable

UNTOUCHED, READ, IN_MODEL, UNKNOWN = Stage.UNTOUCHED, Stage.READ, Stage.IN_MODEL, Stage.UNKNOWN


class Instance:
    """The record of an instance that was given batches of one request each, with the numbers of the batches."""

    def __init__(self, batches: int = 0, *, concurrency: int = 1) -> None:
        self.record = BatchRecord(concurrency)
        self.requests: dict[int, Request] = {}
        self.granted: dict[int, int] = {}
        self.progress: Progress | None = Progress(0, False)
        for number in range(1, batches + 1):
            batch = Batch([Request("m", [], RecordingSink())], first_request_number=number)
            self.requests[number] = batch.requests[0]
            self.record.add(batch)

    def stages(self, last_sent: int = 1 << 30) -> list[Stage]:
        return [stage for _, stage in batch_stages(self.record, self.progress, last_sent)]

    def marks(self, *, decoupled: bool = False) -> list[Hashable]:
        return work_marks(self.record, self.requests, self.granted, self.progress, decoupled=decoupled)


# ---- stages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "stages"),
    [
        (Progress(0, False), [UNTOUCHED, UNTOUCHED, UNTOUCHED]),
        (Progress(1, False), [READ, UNTOUCHED, UNTOUCHED]),
        (Progress(1, True), [IN_MODEL, UNTOUCHED, UNTOUCHED]),
        (Progress(2, False), [IN_MODEL, READ, UNTOUCHED]),
        (Progress(3, True), [IN_MODEL, IN_MODEL, IN_MODEL]),
        (Progress(99, True), [IN_MODEL, IN_MODEL, IN_MODEL]),
        (None, [UNKNOWN, UNTOUCHED, UNTOUCHED]),
    ],
)
def test_what_a_lost_worker_had_begun_is_known_by_its_progress(progress: Progress | None, stages: list[Stage]) -> None:
    instance = Instance(3)
    instance.progress = progress
    assert instance.stages() == stages


def test_a_batch_that_was_never_sent_is_untouched() -> None:
    instance = Instance(2)
    instance.progress = None
    assert instance.stages(last_sent=0) == [UNTOUCHED, UNTOUCHED]
    assert instance.stages(last_sent=1) == [UNKNOWN, UNTOUCHED]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_an_unreachable_worker_may_have_begun_with_all_that_was_sent(concurrency: int) -> None:
    instance = Instance(3, concurrency=concurrency)
    stages = batch_stages(instance.record, None, 2, unreachable=True)
    assert [stage for _, stage in stages] == [UNKNOWN, UNKNOWN, UNTOUCHED]


def test_with_concurrency_the_worker_has_said_what_it_started() -> None:
    instance = Instance(3, concurrency=2)
    instance.record.started(2)
    assert instance.stages() == [UNTOUCHED, IN_MODEL, UNTOUCHED]


# ---- marks ----------------------------------------------------------------------------------


def test_an_idle_instance_has_nothing_that_can_stand_still() -> None:
    assert Instance().marks() == []
    assert Instance().marks(decoupled=True) == []


def test_the_mark_of_a_batch_changes_when_it_is_begun_when_the_model_gets_it_and_when_it_ends() -> None:
    instance = Instance(3)
    seen = []
    for progress in (Progress(0, False), Progress(1, False), Progress(1, True)):
        instance.progress = progress
        [mark] = instance.marks()
        assert [mark] == instance.marks()
        seen.append(mark)
    del instance.requests[1]
    instance.record.executed(1)
    seen += instance.marks()
    assert len(set(seen)) == 4


def test_the_responses_of_a_batch_do_not_make_it_younger_unless_the_model_is_decoupled() -> None:
    instance = Instance(1)
    plain, streaming = instance.marks(), instance.marks(decoupled=True)
    instance.requests[1].response_count += 1
    assert instance.marks() == plain
    assert instance.marks(decoupled=True) != streaming


def test_with_concurrency_each_started_batch_has_a_mark() -> None:
    instance = Instance(3, concurrency=2)
    assert instance.marks() == []
    instance.record.started(1)
    first = instance.marks()
    instance.record.started(2)
    assert len(instance.marks()) == 2
    assert first[0] in instance.marks()


def test_with_concurrency_a_batch_that_stands_still_is_seen_beside_others_that_go_on() -> None:
    instance = Instance(3, concurrency=2)
    instance.record.started(1)
    [hung] = instance.marks()
    for number in (2, 3):
        instance.record.started(number)
        instance.progress = Progress(number, True)
        assert hung in instance.marks()
        instance.record.executed(number)
        del instance.requests[number]
    assert instance.marks() == [hung]


def test_with_concurrency_a_client_that_does_not_read_stops_the_clock_only_for_itself() -> None:
    instance = Instance(2, concurrency=2)
    for number in (1, 2):
        instance.record.started(number)
    instance.requests[1].response_count = CREDIT_WINDOW
    assert len(instance.marks(decoupled=True)) == 1
    instance.requests[2].response_count = CREDIT_WINDOW
    assert instance.marks(decoupled=True) == []


def test_a_request_whose_response_is_to_follow_its_batch_has_a_mark() -> None:
    instance = Instance(2)
    instance.record.executed(1)
    assert ("request", 1) in instance.marks()
    assert len(instance.marks()) == 2


def test_a_decoupled_model_is_one_piece_of_work() -> None:
    instance = Instance(3)
    for number in (1, 2):
        instance.record.executed(number)
    before = instance.marks(decoupled=True)
    assert len(before) == 1
    instance.requests[2].response_count += 1
    after = instance.marks(decoupled=True)
    assert len(after) == 1
    assert after != before


def test_a_decoupled_model_whose_clients_do_not_read_does_not_stand_still() -> None:
    instance = Instance(2)
    for number in (1, 2):
        instance.record.executed(number)
        instance.requests[number].response_count = CREDIT_WINDOW
    assert instance.marks(decoupled=True) == []
    instance.granted[2] = 1
    assert len(instance.marks(decoupled=True)) == 1, "the second client has read one"
    instance.granted[2] = 0
    instance.requests[1].cancelled = True
    assert len(instance.marks(decoupled=True)) == 1, "the model does not wait for a client that has gone"


def test_an_execution_that_waits_for_a_client_does_not_stand_still() -> None:
    instance = Instance(2)
    instance.requests[1].response_count = CREDIT_WINDOW
    assert instance.marks(decoupled=True) == []
    instance.granted[1] = 16
    assert len(instance.marks(decoupled=True)) == 1
