"""A worker enqueues the next batch on its GPU before it waits for the last one.

On the fake, whose waits the test ends.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Timings
from backends.transport import wire
from backends.transport.outbox import Progress
from backends.worker.devices.batch_on_device import Stages
from backends.worker.devices.device_batches import mark_stages
from backends.worker.request import OutputValue
from kernel.errors import InvalidArgument
from shm.cuda import BINDINGS_VARIABLE, cuda
from tests.backends.worker.threaded_worker import LOAD, Bench, Scripted, request
from tests.fake_cuda import runtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Host
    from backends.worker.request import WorkerRequest

WAIT_S = 60


class OnDevice(Scripted):
    """Responds with its inputs, which it gathers on the device."""

    overlaps_on_device = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        #: The numbers of the requests of each batch, when it is enqueued.
        self.enqueued: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        #: Batches with this request fail.
        self.failing = 0

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        device = self.host.device
        assert device is not None
        numbers = [each.ref.number for each in requests]
        array = device.gather(requests, {})["IN"]
        timings.inputs_ready()
        device.computes()
        self.enqueued.put(numbers)
        if self.failing in numbers:
            raise InvalidArgument("as the test wants")
        for row, each in enumerate(requests):
            each.respond([OutputValue("OUT", "FP32", array[2 * row : 2 * row + 2])])


class Gate:
    """Ends the waits for the device, one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Semaphore(0)
        #: The threads that wait.
        self.waits: queue.SimpleQueue[str] = queue.SimpleQueue()
        wait = runtime.cudaEventSynchronize

        def waited(event: Any) -> Any:
            self.waits.put(threading.current_thread().name)
            assert self._open.acquire(timeout=WAIT_S)
            return wait(event)

        monkeypatch.setattr(runtime, "cudaEventSynchronize", waited)

    def open(self, count: int = 1) -> None:
        self._open.release(count)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    runtime.forget_work()
    cuda.cache_clear()
    monkeypatch.setattr("backends.worker.devices.device_batches.SLOW_NS", -1)
    yield Gate(monkeypatch)
    cuda.cache_clear()


def execute(number: int, *requests: int) -> wire.Execute:
    return wire.Execute(number, [request(each, np.full(2, each, np.float32).tobytes()) for each in requests])


def values(executed: wire.Executed) -> list[float]:
    return [float(response.outputs[0].as_numpy()[0]) for response in executed.responses]


def begin(bench: Bench, gate: Gate, *messages: wire.Execute, failing: int = 0) -> OnDevice:
    """Let batch 1 be executed, while `messages` come. Returns the backend, which goes on with them.

    Batches with the request `failing` fail.
    """
    bench.hello()
    bench.kind = OnDevice
    bench.send(msgspec.structs.replace(LOAD, kind="GPU", pinned_byte_size=1 << 20, device_pool_byte_size=1 << 20))
    assert bench.next(wire.Loaded).overlaps
    backend = bench.backend
    assert isinstance(backend, OnDevice)
    backend.failing = failing
    bench.send(execute(1, 1), *messages)
    assert backend.enqueued.get(timeout=WAIT_S) == [1]
    gate.open()
    assert bench.next(wire.Executed).batch == 1
    return backend


def test_the_next_batch_is_enqueued_before_the_last_one_is_waited_for(bench: Bench, gate: Gate) -> None:
    backend = begin(bench, gate, execute(2, 20, 21), execute(3, 30), execute(4, 40))
    assert gate.waits.get(timeout=WAIT_S) != "naiad device", "the first batch came alone"
    assert [backend.enqueued.get(timeout=WAIT_S) for _ in range(2)] == [[20, 21], [30]]
    assert gate.waits.get(timeout=WAIT_S) == "naiad device"
    assert backend.enqueued.empty(), "two are in flight"
    assert bench.outbox.progress() == Progress(3, in_model=True), "a lost worker has begun with both"
    gate.open()
    executed = bench.next(wire.Executed)
    assert (executed.batch, values(executed)) == (2, [20, 21])
    assert backend.enqueued.get(timeout=WAIT_S) == [40], "while the third batch is computed"
    gate.open(2)
    found = [bench.next(wire.Executed) for _ in range(2)]
    assert [(each.batch, values(each)) for each in found] == [(3, [30]), (4, [40])]
    for each in found:
        assert each.compute_start_ns <= each.input_end_ns <= each.output_start_ns <= each.compute_end_ns


def test_only_the_batch_that_fails_has_errors(bench: Bench, gate: Gate) -> None:
    begin(bench, gate, execute(2, 20), execute(3, 30), execute(4, 40), failing=30)
    gate.open(3)
    second, third, fourth = (bench.next(wire.Executed) for _ in range(3))
    assert (values(second), values(fourth)) == ([20], [40])
    assert [response.error_text for response in third.responses] == ["as the test wants"]


def test_a_request_whose_client_has_gone_is_not_enqueued(bench: Bench, gate: Gate) -> None:
    begin(bench, gate, execute(2, 20), execute(3, 30), execute(4, 40, 41))
    bench.send(wire.Cancel([40]))
    gate.open()
    assert bench.next(wire.Executed).batch == 2
    gate.open(2)
    third, fourth = (bench.next(wire.Executed) for _ in range(2))
    assert values(third) == [30]
    assert [bool(response.error_code) for response in fourth.responses] == [True, False]
    assert float(fourth.responses[1].outputs[0].as_numpy()[0]) == 41


def test_another_message_is_handled_when_nothing_is_in_flight(bench: Bench, gate: Gate) -> None:
    backend = begin(bench, gate, execute(2, 20), execute(3, 30))
    bench.send(wire.Stop())
    gate.open(2)
    assert [bench.next(wire.Executed).batch for _ in range(2)] == [2, 3]
    bench.join()
    assert backend.finalized == 1


def test_sequences_do_not_overlap(bench: Bench, gate: Gate) -> None:
    bench.hello()
    bench.kind = OnDevice
    config = '{"name": "m", "backend": "scripted", "max_batch_size": 2, "sequence_batching": {"direct": {}}}'
    bench.send(msgspec.structs.replace(LOAD, config=config, kind="GPU"))
    assert not bench.next(wire.Loaded).overlaps


times = st.integers(0, 10**7)


@given(times, times, times, st.none() | times, times, times)
def test_times_are_in_order_whatever_the_device_says(
    start_ns: int, gather_ns: int, wait_ns: int, input_ns: int | None, output_ns: int, before_ns: int
) -> None:
    timings = Timings(start_ns, start_ns + gather_ns, start_ns + gather_ns)
    ended_ns = start_ns + gather_ns + wait_ns
    mark_stages(timings, Stages(input_ns, output_ns), ended_ns, before_ns=before_ns)
    assert start_ns <= timings.start_ns <= timings.inputs_ready_ns <= timings.inferred_ns <= ended_ns


def test_a_batch_that_was_copied_before_the_device_was_free_has_waited_in_a_queue() -> None:
    timings = Timings(1000, 1100, 1100)
    mark_stages(timings, Stages(4000, 1000), 6000, before_ns=3000)
    assert (timings.start_ns, timings.inputs_ready_ns, timings.inferred_ns) == (2000, 3000, 5000)
    timings = Timings(1000, 1100, 1100)
    mark_stages(timings, Stages(None, 0), 6000, before_ns=0)
    assert (timings.start_ns, timings.inputs_ready_ns, timings.inferred_ns) == (1000, 1100, 6000)
