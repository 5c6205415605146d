"""Many sequences: any order of events, and ten thousand at once."""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from kernel.errors import InvalidRequest
from kernel.serving.events import Cancelled
from kernel.testing import FakeInstance, Lab, RecordingSink
from tests.schedulers.sequence_lab import IDLE_NS, MS, sequence_lab

if TYPE_CHECKING:
    from kernel.serving.request import Request

#: What happens, with three numbers that choose what it happens to.
events = st.lists(
    st.tuples(
        st.sampled_from(["send"] * 5 + ["finish"] * 4 + ["cancel", "lose", "retire", "wait", "add"]),
        st.integers(0, 5),
        st.booleans(),
        st.booleans(),
    ),
    max_size=80,
)


class Story:
    """Plays events against a scheduler, and checks after each of them what must always be true."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.sent: dict[Request, None] = {}
        #: The ids of the requests of each batch, by sequence, in the order of execution.
        self.executed: dict[object, list[int]] = {}
        self.instances_of: dict[object, set[str]] = {}

    def play(self, what: str, number: int, start: bool, end: bool) -> None:
        lab = self.lab
        workers = [worker for worker in lab.workers if worker.batches]
        if what == "send":
            try:
                request = lab.submit_to_sequence(
                    number + 1, id=str(len(self.sent)), start=start, end=end, timeout_us=number * 400
                )
            except InvalidRequest:
                assert not start, "a request with START is never refused"
            else:
                self.sent[request] = None
        elif what == "finish" and workers:
            worker = workers[number % len(workers)]
            for request in worker.batches[0].requests:
                self.executed.setdefault(request.sequence, []).append(int(request.id))
                self.instances_of.setdefault(request.sequence, set()).add(worker.name)
            lab.finish(lab.workers.index(worker))
        elif what == "cancel" and self.sent:
            request = list(self.sent)[-1 - number % len(self.sent)]
            if not request.finished and not request.dispatched:
                lab.inbox.post(Cancelled(request))
                assert request.finished
        elif what == "lose" and lab.workers:
            lab.lose(number % len(lab.workers))
            lab.workers.pop(number % len(lab.workers))
        elif what == "retire" and lab.workers:
            lab.instances.retire(lab.workers[number % len(lab.workers)])
        elif what == "add":
            lab.workers.append(FakeInstance(f"added_{len(self.sent)}_{len(lab.workers)}"))
            lab.instances.add(lab.workers[-1])
        elif what == "wait":
            lab.clock.advance(IDLE_NS // 3 * number + 1)
        lab.clock.end_iteration()
        self.check()

    def check(self) -> None:
        self.lab.check()
        assert not self.lab.crashes
        for worker in self.lab.workers:
            for batch in worker.batches:
                assert len(batch.requests) <= 4
                sequences = [request.sequence for request in batch.requests]
                assert len(set(sequences)) == len(sequences), "two requests of a sequence are in one batch"
        for order in self.executed.values():
            assert order == sorted(order), "the requests of a sequence are executed in order"
        assert all(len(names) == 1 for names in self.instances_of.values()), "a sequence stays at its instance"

    def end(self) -> None:
        """Let everything end: each request has exactly one response, and no slot is lost."""
        lab = self.lab
        self.play("add", 0, False, False)
        for _ in range(400):
            for _ in range(sum(bool(worker.batches) for worker in lab.workers)):
                self.play("finish", 0, False, False)
            lab.clock.advance(IDLE_NS)
            if not len(lab.sequences):
                break
        assert len(lab.sequences) == 0
        for request in self.sent:
            assert request.finished
            assert isinstance(request.sink, RecordingSink)
            assert len(request.sink.responses) == 1
        self.check()


@settings(max_examples=150, deadline=None)
@given(events, st.booleans(), st.integers(1, 4), st.integers(0, 3))
def test_each_request_is_answered_once_and_sequences_stay_in_order_and_in_place(
    given_events: list[tuple[str, int, bool, bool]], oldest: bool, slots: int, instances: int
) -> None:
    story = Story(sequence_lab(instances, oldest=oldest, slots=slots))
    for event in given_events:
        story.play(*event)
    story.end()


def _step_ns(lab: Lab, live: int) -> float:
    """Return how long a step of one sequence takes, at the best of several times."""
    best = float("inf")
    for number in range(1, 200):
        begun = time.perf_counter_ns()
        lab.submit_to_sequence(1 + number * 37 % live)
        lab.clock.end_iteration()
        lab.finish()
        best = min(best, time.perf_counter_ns() - begun)
    return best


def _with_live(count: int) -> tuple[Lab, int]:
    """Return a scheduler with `count` live sequences, and the bytes that they take."""
    lab = sequence_lab(oldest=True, slots=10_000)
    tracemalloc.start()
    for number in range(1, count + 1):
        lab.submit_to_sequence(number, start=True)
        lab.clock.end_iteration()
        lab.finish()
        lab.workers[0].batches.clear()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return lab, taken


def test_ten_thousand_live_sequences_cost_as_much_each_as_a_hundred() -> None:
    few, few_bytes = _with_live(100)
    many, many_bytes = _with_live(10_000)
    assert many_bytes / 10_000 < 1000, "bytes of one sequence"
    assert many_bytes / 10_000 < 2 * few_bytes / 100
    assert _step_ns(many, 10_000) < 3 * _step_ns(few, 100)
    many.clock.advance(IDLE_NS + MS)
    assert len(many.sequences) == 0
    many.check()
