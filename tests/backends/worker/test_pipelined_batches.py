"""While a slow model computes a batch, the worker prepares the next one and responds to the last one."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.base import PreparedBatch
from backends.transport import wire
from backends.transport.outbox import Progress
from backends.worker import pipelined_batches
from backends.worker.request import OutputValue
from kernel.errors import Unavailable
from tests.backends.worker.threaded_worker import LOAD, Bench, Scripted, request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from backends.base import Host, Timings
    from backends.worker.request import WorkerRequest

WAIT_S = 60


class Prepared(PreparedBatch):
    """A batch whose computation the test ends."""

    def __init__(self, backend: Pipelining, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        self.backend = backend
        self.requests = list(requests)
        self.timings = timings
        self.numbers = [each.ref.number for each in requests]
        self.release = threading.Event()
        #: What `run` and `respond` do at last.
        self.at_end: Callable[[], None] = lambda: None
        self.at_response: Callable[[], None] = lambda: None

    def run(self) -> None:
        self.timings.inputs_ready()
        self.backend.running.put(self)
        assert self.release.wait(WAIT_S)
        self.timings.inferred()
        self.at_end()

    def respond(self) -> None:
        self.backend.responding.put(self.numbers)
        self.at_response()
        for each in self.requests:
            each.respond([OutputValue("OUT", "FP32", each.inputs[0].as_numpy())])

    def end(self) -> None:
        self.release.set()


class Pipelining(Scripted):
    """Pipelines; its first batch is executed in the main thread, and takes as long as the test wants."""

    pipelines = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.first = threading.Event()
        #: Batches in the order in which their computation begins, their preparation, and their responses.
        self.running: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self.prepared: queue.SimpleQueue[Prepared] = queue.SimpleQueue()
        self.responding: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        #: The numbers of the requests that `execute` got, batch by batch.
        self.executed: list[list[int]] = []
        self.refuses = False
        self.main_thread = 0

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        self.main_thread = threading.get_ident()
        timings.inputs_ready()
        self.executed.append([each.ref.number for each in requests])
        assert self.first.wait(WAIT_S)
        timings.inferred()
        for each in requests:
            each.respond([OutputValue("OUT", "FP32", each.inputs[0].as_numpy())])

    def prepare(self, requests: Sequence[WorkerRequest], timings: Timings) -> PreparedBatch | None:
        assert threading.get_ident() == self.main_thread
        if self.refuses:
            return None
        made = Prepared(self, requests, timings)
        self.prepared.put(made)
        return made


@pytest.fixture(autouse=True)
def every_execution_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.worker.loop.SLOW_NS", -1)
    monkeypatch.setattr(pipelined_batches, "SWITCH_INTERVAL_S", 0.005)  # that of the process that runs the tests


def load(bench: Bench) -> Pipelining:
    """Return the backend, which executes batch 1 with request 1."""
    backend = bench.load(kind=Pipelining)
    assert isinstance(backend, Pipelining)
    return backend


def begin(bench: Bench, *messages: wire.Execute) -> Pipelining:
    """Let batch 1 be executed, and `messages` come meanwhile: the worker pipelines them. Returns the backend."""
    backend = load(bench)
    bench.send(wire.Execute(1, [request(1)]), *messages)
    backend.first.set()
    assert bench.next(wire.Executed).batch == 1
    return backend


def execute(number: int, *requests: int) -> wire.Execute:
    return wire.Execute(number, [request(each, np.full(2, each, np.float32).tobytes()) for each in requests])


def values(executed: wire.Executed) -> list[float]:
    return [float(response.outputs[0].as_numpy()[0]) for response in executed.responses]


def test_the_next_batch_is_prepared_and_the_last_one_answered_while_one_is_computed(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20, 21), execute(3, 30))
    first = backend.running.get(timeout=WAIT_S)
    assert first.numbers == [20, 21]
    assert backend.prepared.get(timeout=WAIT_S) is first
    second = backend.prepared.get(timeout=WAIT_S)
    assert second.numbers == [30]
    bench.send(execute(4, 40))
    first.end()
    assert backend.running.get(timeout=WAIT_S) is second
    executed = bench.next(wire.Executed)
    assert (executed.batch, values(executed)) == (2, [20, 21]), "sent while the second batch is computed"
    third = backend.prepared.get(timeout=WAIT_S)
    assert third.numbers == [40]
    second.end()
    third.end()
    assert [bench.next(wire.Executed).batch for _ in range(2)] == [3, 4]
    assert backend.executed == [[1]]
    bench.stop()


def test_the_next_batch_is_begun_before_the_responses_of_the_last_one_are_made(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20), execute(3, 30))
    first = backend.running.get(timeout=WAIT_S)
    assert backend.prepared.get(timeout=WAIT_S) is first
    second = backend.prepared.get(timeout=WAIT_S)
    begun: list[bool] = []
    first.at_response = lambda: begun.append(backend.running.get(timeout=WAIT_S) is second)
    first.end()
    second.end()
    bench.next(wire.Executed)
    bench.next(wire.Executed)
    assert begun == [True]
    bench.stop()


def test_a_batch_that_comes_alone_is_executed_in_the_main_thread(bench: Bench) -> None:
    backend = load(bench)
    backend.first.set()
    for number in (1, 2, 3):
        bench.send(execute(number, number))
        assert values(bench.next(wire.Executed)) == [number]
    assert backend.executed == [[1], [2], [3]]
    assert backend.prepared.empty()
    bench.stop()


def test_after_the_last_batch_the_main_thread_executes_again(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20))
    backend.running.get(timeout=WAIT_S).end()
    assert bench.next(wire.Executed).batch == 2
    bench.send(execute(3, 30))
    assert values(bench.next(wire.Executed)) == [30]
    assert backend.executed == [[1], [30]]
    bench.stop()


def test_other_messages_are_handled_in_their_order(bench: Bench) -> None:
    backend = load(bench)
    bench.send(wire.Execute(1, [request(1)]), execute(2, 20), wire.Stop())
    backend.first.set()
    assert bench.next(wire.Executed).batch == 1
    batch = backend.running.get(timeout=WAIT_S)
    assert not backend.finalized
    batch.end()
    assert bench.next(wire.Executed).batch == 2
    bench.join()
    assert backend.finalized


def test_a_failure_is_of_its_batch_alone(bench: Bench) -> None:
    def fail() -> None:
        raise Unavailable("no")

    def crash() -> None:
        raise RuntimeError("oh")

    backend = begin(bench, execute(2, 20, 21), execute(3, 30))
    first = backend.running.get(timeout=WAIT_S)
    first.at_end = fail
    bench.send(execute(4, 40), execute(5, 50))
    first.end()
    assert [response.error_text for response in bench.next(wire.Executed).responses] == ["no", "no"]
    second = backend.running.get(timeout=WAIT_S)
    second.at_response = crash
    second.end()
    assert [response.error_text for response in bench.next(wire.Executed).responses] == ["RuntimeError: oh"]
    third = backend.running.get(timeout=WAIT_S)
    third.at_end = crash
    third.end()
    assert [response.error_text for response in bench.next(wire.Executed).responses] == ["RuntimeError: oh"]
    backend.running.get(timeout=WAIT_S).end()
    assert values(bench.next(wire.Executed)) == [50]
    bench.stop()


def test_a_request_without_a_response_gets_an_error(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20, 21))
    batch = backend.running.get(timeout=WAIT_S)
    batch.requests.pop()
    batch.end()
    given, missing = bench.next(wire.Executed).responses
    assert (given.error_text, missing.error_text) == ("", "the backend did not respond to the request")
    bench.stop()


def test_a_batch_that_cannot_be_prepared_is_executed_after_the_one_that_is_computed(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20))
    first = backend.running.get(timeout=WAIT_S)
    backend.refuses = True
    bench.send(execute(3, 30), execute(4, 40))
    first.end()
    assert [values(bench.next(wire.Executed)) for _ in range(3)] == [[20], [30], [40]]
    assert backend.executed == [[1], [30], [40]]
    bench.stop()


def test_requests_that_are_cancelled_before_their_batch_is_computed_are_left_out(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20), execute(3, 30, 31))
    first = backend.running.get(timeout=WAIT_S)
    for _ in range(2):
        backend.prepared.get(timeout=WAIT_S)
    bench.send(wire.Cancel([30]), wire.Recall(), execute(4, 40))
    assert bench.next(wire.Recalled).batches == [], "what was sent before was read"
    first.end()
    assert bench.next(wire.Executed).batch == 2
    behind = backend.running.get(timeout=WAIT_S)
    assert behind.numbers == [40]
    bench.send(execute(5, 50))
    behind.end()
    executed = bench.next(wire.Executed)
    assert (executed.batch, [response.error_code for response in executed.responses]) == (3, ["cancelled", ""])
    assert backend.executed == [[1], [31]]
    assert values(bench.next(wire.Executed)) == [40], "responses keep the order of batches"
    backend.running.get(timeout=WAIT_S).end()
    assert values(bench.next(wire.Executed)) == [50]
    bench.stop()


def test_the_kernel_sees_which_batch_the_model_has(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20), execute(3, 30))
    first = backend.running.get(timeout=WAIT_S)
    assert backend.prepared.get(timeout=WAIT_S) is first
    reading: list[Progress] = []
    second = backend.prepared.get(timeout=WAIT_S)
    bench.send(execute(4, 40))
    second.at_end = lambda: reading.append(bench.outbox.progress())
    first.end()
    assert backend.running.get(timeout=WAIT_S) is second
    assert backend.prepared.get(timeout=WAIT_S).numbers == [40]
    second.end()
    backend.running.get(timeout=WAIT_S).end()
    for _ in range(3):
        bench.next(wire.Executed)
    assert reading == [Progress(3, True)], "the batch behind it was only prepared"
    bench.stop()


def test_the_time_in_which_a_batch_waits_for_the_one_before_is_no_input_time(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20), execute(3, 30))
    first = backend.running.get(timeout=WAIT_S)
    for _ in range(2):
        backend.prepared.get(timeout=WAIT_S)
    first.end()
    second = backend.running.get(timeout=WAIT_S)
    second.end()
    before, after = bench.next(wire.Executed), bench.next(wire.Executed)
    times = after.compute_start_ns, after.input_end_ns, after.output_start_ns, after.compute_end_ns
    assert list(times) == sorted(times)
    assert after.input_end_ns >= before.output_start_ns
    assert after.compute_start_ns > before.input_end_ns, "its inputs were gathered before that"
    bench.stop()


def test_a_worker_whose_kernel_is_gone_ends_although_a_batch_is_computed(bench: Bench) -> None:
    backend = begin(bench, execute(2, 20))
    batch = backend.running.get(timeout=WAIT_S)
    bench.leave()
    batch.end()


def test_a_model_with_sequences_is_not_pipelined(bench: Bench) -> None:
    config = '{"name": "m", "backend": "scripted", "max_batch_size": 4, "sequence_batching": {}}'
    bench.hello()
    bench.kind = Pipelining
    bench.send(wire.Load(config, "/models/m", 1, "m_0", arena_byte_size=LOAD.arena_byte_size))
    bench.next(wire.Loaded)
    backend = bench.backend
    assert isinstance(backend, Pipelining)
    backend.first.set()
    batches = [wire.Execute(number, [request(number)]) for number in (1, 2, 3)]
    for batch in batches:
        batch.requests[0].sequence = wire.SequenceEntry(0, False)
    bench.send(*batches)
    for _ in batches:
        bench.next(wire.Executed)
    assert backend.executed == [[1], [2], [3]]
    bench.stop()
