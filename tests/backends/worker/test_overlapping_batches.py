"""A worker executes several batches at the same time, and each ends on its own."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from backends.transport import wire
from backends.worker.request import OutputValue
from kernel.errors import Unavailable
from tests.backends.worker.threaded_worker import LOAD, Bench, Scripted, request

if TYPE_CHECKING:
    from collections.abc import Callable

    from backends.base import Timings
    from backends.worker.request import WorkerRequest
    from kernel.errors import ServingError

    Ended = Callable[[ServingError | None], None]


class Begun:
    """A batch that the backend has begun and that the test ends."""

    def __init__(self, requests: list[WorkerRequest], timings: Timings, ended: Ended) -> None:
        self.requests = requests
        self.timings = timings
        self._ended = ended

    def respond(self) -> None:
        for each in self.requests:
            each.respond([OutputValue("OUT", "FP32", each.inputs[0].as_numpy())])

    def end(self, failure: ServingError | None = None) -> None:
        self.requests.clear()
        self._ended(failure)


class Overlapping(Scripted):
    """Executes two batches at the same time."""

    begun: queue.SimpleQueue[Begun]

    @property
    def concurrency(self) -> int:
        return 2

    def begin(self, requests: list[WorkerRequest], timings: Timings, ended: Ended) -> None:
        self.begun.put(Begun(requests, timings, ended))


class OverlappingLater(Overlapping):
    responds_later = True


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> queue.SimpleQueue[Begun]:
    batches: queue.SimpleQueue[Begun] = queue.SimpleQueue()
    monkeypatch.setattr(Overlapping, "begun", batches, raising=False)
    return batches


def load(bench: Bench, kind: type[Scripted] = Overlapping, message: wire.Load = LOAD) -> None:
    bench.hello()
    bench.kind = kind
    bench.send(message)
    assert bench.next(wire.Loaded).concurrency == 2


def test_batches_end_in_any_order(bench: Bench, begun: queue.SimpleQueue[Begun]) -> None:
    load(bench)
    bench.send(wire.Execute(1, [request(1), request(2)]), wire.Execute(2, [request(3)]))
    first, second = begun.get(timeout=60), begun.get(timeout=60)
    assert [bench.next(wire.Started).batch for _ in range(2)] == [1, 2]
    second.respond()
    second.end()
    executed = bench.next(wire.Executed)
    assert (executed.batch, len(executed.responses)) == (2, 1)
    first.respond()
    first.end()
    executed = bench.next(wire.Executed)
    assert (executed.batch, len(executed.responses)) == (1, 2)
    assert executed.compute_start_ns <= executed.input_end_ns <= executed.output_start_ns <= executed.compute_end_ns
    bench.stop()


def test_no_more_batches_than_the_concurrency_are_begun(bench: Bench, begun: queue.SimpleQueue[Begun]) -> None:
    load(bench)
    bench.send(*(wire.Execute(number, [request(number)]) for number in range(1, 5)))
    running = [begun.get(timeout=60), begun.get(timeout=60)]
    assert [bench.next(wire.Started).batch for _ in range(2)] == [1, 2]
    for number in (3, 4):
        ended = running.pop()
        ended.respond()
        ended.end()
        bench.next(wire.Executed)
        assert bench.next(wire.Started).batch == number
        running.append(begun.get(timeout=60))
    assert begun.empty()
    for last in running:
        last.respond()
        last.end()
        bench.next(wire.Executed)
    bench.stop()


def test_a_failure_and_a_missing_response_are_of_their_batch_alone(
    bench: Bench, begun: queue.SimpleQueue[Begun]
) -> None:
    load(bench)
    bench.send(wire.Execute(1, [request(1), request(2)]), wire.Execute(2, [request(3)]))
    first, second = begun.get(timeout=60), begun.get(timeout=60)
    for _ in range(2):
        bench.next(wire.Started)
    first.requests[0].respond([])
    first.end(Unavailable("no"))
    assert [response.error_text for response in bench.next(wire.Executed).responses] == ["", "no"]
    second.end()
    [missing] = bench.next(wire.Executed).responses
    assert missing.error_text == "the backend did not respond to the request"
    bench.stop()


def test_responses_after_the_end_of_a_batch_are_sent_at_once(bench: Bench, begun: queue.SimpleQueue[Begun]) -> None:
    load(bench, OverlappingLater)
    bench.send(wire.Execute(1, [request(1), request(2)]))
    batch = begun.get(timeout=60)
    early, late = batch.requests
    early.respond([])
    batch.end()
    bench.next(wire.Started)
    assert (bench.next(wire.Responded).request, bench.next(wire.Executed).responses) == (1, [])
    late.respond([])
    responded = bench.next(wire.Responded)
    assert (responded.request, responded.final) == (2, True)
    bench.stop()


def test_a_decoupled_model_does_not_wait_for_the_end_of_its_batch(
    bench: Bench, begun: queue.SimpleQueue[Begun]
) -> None:
    config = '{"name": "m", "backend": "scripted", "model_transaction_policy": {"decoupled": true}}'
    load(bench, OverlappingLater, wire.Load(config, "/models/m", 1, "m_0"))
    bench.send(wire.Execute(1, [request(1)]))
    batch = begun.get(timeout=60)
    bench.next(wire.Started)
    batch.respond()
    assert bench.next(wire.Responded).final
    batch.end()
    bench.next(wire.Executed)
    bench.stop()


@pytest.mark.parametrize("kind", [Overlapping, OverlappingLater])
def test_a_batch_whose_clients_have_gone_ends_without_the_model(
    bench: Bench, begun: queue.SimpleQueue[Begun], kind: type[Scripted]
) -> None:
    load(bench, kind)
    bench.send(wire.Cancel([1]), wire.Execute(1, [request(1)]), wire.Execute(2, [request(2)]))
    begun.get(timeout=60).end(Unavailable("over"))
    bench.next(wire.Started)
    [cancelled] = bench.next(wire.Executed).responses
    assert cancelled.error_code == "cancelled"
    bench.next(wire.Started)
    bench.next(wire.Executed)
    bench.stop()


def test_many_threads_end_batches(bench: Bench, begun: queue.SimpleQueue[Begun]) -> None:
    load(bench)
    count = 200
    bench.send(*(wire.Execute(n, [request(n, np.full(2, n, np.float32).tobytes())]) for n in range(1, count + 1)))

    def work() -> None:
        while True:
            batch = begun.get()
            if not batch.requests:
                return
            batch.respond()
            batch.end()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[int, object] = {}
    while len(seen) < count:
        raw = bench.channel.receive()
        assert raw is not None
        for message in map(wire.to_kernel_decoder.decode, raw):
            if isinstance(message, wire.Executed):
                [response] = message.responses
                seen[message.batch] = response.outputs[0].data
    for _ in threads:
        begun.put(Begun([], None, lambda _: None))  # type: ignore[arg-type]  # never used
    for thread in threads:
        thread.join()
    assert all(seen[n] == np.full(2, n, np.float32).tobytes() for n in range(1, count + 1))
    bench.stop()
