"""Two batches in flight on one instance, on the fake: its clock says what a device would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.backends.onnxruntime.sending_lab import SendingLab, calls, waited
from tests.backends.onnxruntime.sessions_on_device import loaded, models, ort
from tests.fake_cuda import runtime

if TYPE_CHECKING:
    import collections
    from collections.abc import Iterator

    from backends.onnxruntime.backend import OnnxRuntimeBackend
    from backends.worker.devices.batch_on_device import EnqueuedBatch
    from backends.worker.request import WorkerRequest
    from tests.backends.onnxruntime.conftest import OnnxModels
    from tests.fake_onnxruntime import FakeOnnxRuntime

__all__ = ["calls", "models", "ort"]

COUNT = 50


@pytest.fixture
def lab() -> SendingLab:
    made = SendingLab()
    made.instance_device.poll_ns = 0
    return made


@pytest.fixture
def clock() -> Iterator[runtime.Clock]:
    """A device that computes for 2 ms, and copies the inputs for 1 ms, and the outputs."""
    runtime.clock.reset(copy_ms=0.5, execution_ms=2.0)  # A and B are a copy each, and so are X and Y
    yield runtime.clock
    runtime.clock.reset()


def batch(lab: SendingLab, number: int) -> list[WorkerRequest]:
    """Return a request, whose values say the number."""
    return [lab.request({name: np.full((1, 4), number * factor, np.float32) for name, factor in (("A", 3), ("B", 1))})]


def check(lab: SendingLab, requests: list[WorkerRequest], number: int) -> None:
    for request in requests:
        found = lab.fetched[request.ref.number]
        assert np.frombuffer(found["X"], np.float32).tolist() == [4 * number] * 4
        assert np.frombuffer(found["Y"], np.float32).tolist() == [2 * number] * 4


def enqueued(lab: SendingLab, backend: OnnxRuntimeBackend, requests: list[WorkerRequest]) -> EnqueuedBatch:
    device = lab.instance_device
    device.begin_overlapping()
    backend.execute(requests, lab.timings)
    return device.end_overlapping()


def test_two_batches_in_flight_have_1_6_times_the_rate_of_one(
    lab: SendingLab, models: OnnxModels, ort: FakeOnnxRuntime, clock: runtime.Clock
) -> None:
    backend = loaded(lab, models)
    for number in range(COUNT):
        requests = batch(lab, number)
        backend.execute(requests, lab.timings)
        lab.instance_device.synchronize()
        check(lab, requests, number)
    one_ms = clock.host_ms / COUNT
    clock.reset(copy_ms=0.5, execution_ms=2.0)
    last: tuple[list[WorkerRequest], EnqueuedBatch] | None = None
    for number in range(COUNT):
        requests = batch(lab, number)
        following = enqueued(lab, backend, requests)
        if last is not None:
            last[1].wait()
            last[1].finish()
            check(lab, last[0], number - 1)
        last = requests, following
    assert last is not None
    last[1].wait()
    last[1].finish()
    check(lab, last[0], COUNT - 1)
    two_ms = clock.host_ms / COUNT
    assert (one_ms, backend.overlaps_on_device) == (4.0, True)
    assert one_ms / two_ms >= 1.6


def test_the_stages_of_a_batch_are_those_of_the_device(
    lab: SendingLab, models: OnnxModels, ort: FakeOnnxRuntime, clock: runtime.Clock
) -> None:
    backend, device = loaded(lab, models), lab.instance_device
    first, second = (enqueued(lab, backend, batch(lab, number)) for number in range(2))
    stages = []
    for each in (first, second):
        each.wait()
        stages.append(each.finish())
    # The inputs of the second batch are there 1 ms after those of the first, and wait for 1 ms.
    assert [(each.input_ns, each.output_ns) for each in stages] == [(3_000_000, 1_000_000), (4_000_000, 1_000_000)]
    device.timed = True
    backend.execute(batch(lab, 3), lab.timings)
    device.synchronize()
    assert device.stages is not None
    assert (device.stages.input_ns, device.stages.output_ns) == (3_000_000, 1_000_000)


def test_an_overlapping_batch_orders_three_streams_and_waits_once(
    lab: SendingLab, models: OnnxModels, ort: FakeOnnxRuntime, calls: collections.Counter[str]
) -> None:
    backend = loaded(lab, models)
    for number in range(3):
        calls.clear()
        found = enqueued(lab, backend, batch(lab, number))
        found.wait()
        found.finish()
    assert {name: count for name, count in waited(calls).items() if name.startswith(("cudaE", "cudaM", "cudaSt"))} == {
        "cudaMemcpyAsync": 4, "cudaEventRecord": 3, "cudaStreamWaitEvent": 2, "cudaEventSynchronize": 1,
        "cudaEventElapsedTime": 2,
    }  # fmt: skip


def test_a_failed_batch_between_two_others_leaves_their_outputs_alone(
    lab: SendingLab, models: OnnxModels, ort: FakeOnnxRuntime
) -> None:
    backend: Any = loaded(lab, models)
    good = batch(lab, 1)
    first = enqueued(lab, backend, good)
    device = lab.instance_device
    device.begin_overlapping()
    wrong = lab.request({"A": np.zeros((1, 4), np.float32), "B": np.zeros((1, 3), np.float32)})
    with pytest.raises(Exception, match="B"):
        backend.execute([wrong], lab.timings)
    second = device.end_overlapping()
    first.wait()
    first.finish()
    later = batch(lab, 2)
    third = enqueued(lab, backend, later)
    for each in (second, third):
        each.wait()
        each.finish()
    check(lab, good, 1)
    check(lab, later, 2)
