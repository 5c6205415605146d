"""How many calls of CUDA a batch makes beside ONNX Runtime's own: each takes time of the processor and of the GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shm.tensor import RequestedOutput
from tests.backends.add_sub_batch import floats
from tests.backends.device_lab import at
from tests.backends.onnxruntime.sending_lab import SendingLab, calls, waited
from tests.backends.onnxruntime.sessions_on_device import loaded, models, ort
from tests.fake_cuda import runtime

if TYPE_CHECKING:
    import collections

    from shm.cuda import CudaError
    from tests.backends.onnxruntime.conftest import OnnxModels
    from tests.fake_onnxruntime import FakeOnnxRuntime

__all__ = ["calls", "models", "ort"]


@pytest.fixture
def lab() -> SendingLab:
    return SendingLab()


def test_from_region_to_region_a_batch_of_one_only_waits(
    lab: SendingLab, models: OnnxModels, ort: FakeOnnxRuntime, calls: collections.Counter[str]
) -> None:
    backend = loaded(lab, models)
    a, b = floats(1, 4), floats(1, 4) * 3
    target = lab.on_device(np.zeros((1, 4), np.float32))
    lab.regions[7] = target, 16
    request = lab.request({}, outputs=["X"])
    request.inputs.extend([lab.device_input("A", a), lab.device_input("B", b)])  # type: ignore[list-item]
    span: Any = SimpleNamespace(lease=SimpleNamespace(region_number=7), offset=0, byte_size=16)
    request.ref.outputs[0] = RequestedOutput("X", span=span)
    lab.instance_device.poll_ns = 0
    calls.clear()
    backend.execute([request], lab.timings)
    lab.instance_device.synchronize()
    assert waited(calls) == {"cudaEventRecord": 1, "cudaEventSynchronize": 1}
    assert np.array_equal(at(target, (1, 4)), a + b)


@pytest.mark.parametrize("offset", [0, 16, 4])
def test_an_output_may_be_anywhere_in_a_region_of_its_client(
    lab: SendingLab, models: OnnxModels, ort: FakeOnnxRuntime, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """Kernels store vectors: at another address than a multiple of their size they end the process (716)."""

    def lost(error: CudaError) -> None:
        runtime.find_device()
        raise AssertionError(f"the worker ends: {error}")

    monkeypatch.setattr("backends.worker.devices.instance_device.end_if_lost", lost)
    backend = loaded(lab, models)
    a, b = floats(1, 4), floats(1, 4) * 3
    block = lab.on_device(np.zeros((2, 4), np.float32))
    lab.regions[7] = block, 32
    request = lab.request({"A": a, "B": b}, outputs=["X"])
    span: Any = SimpleNamespace(lease=SimpleNamespace(region_number=7), offset=offset, byte_size=16)
    request.ref.outputs[0] = RequestedOutput("X", span=span)
    backend.execute([request], lab.timings)
    lab.instance_device.synchronize()
    if offset % 256:  # the worker copies what the backend has computed elsewhere
        assert np.frombuffer(lab.fetched[request.ref.number]["X"], np.float32).tolist() == (a + b)[0].tolist()
    else:
        assert np.array_equal(at(block, (1, 4)), a + b)


def test_thirty_two_small_requests_are_copied_in_once_and_fetched_with_one_copy_for_each_output(
    lab: SendingLab, models: OnnxModels, ort: FakeOnnxRuntime, calls: collections.Counter[str]
) -> None:
    backend = loaded(lab, models, max_batch_size=32)
    lab.instance_device.poll_ns = 0
    for _ in range(2):  # the first batch allocates what later ones use
        requests = [lab.request({"A": floats(1, 4) + row, "B": floats(1, 4)}) for row in range(32)]
        calls.clear()
        backend.execute(requests, lab.timings)
        lab.instance_device.synchronize()
    assert waited(calls) == {"cudaMemcpyAsync": 3, "cudaEventRecord": 1, "cudaEventSynchronize": 1}
    for row, request in enumerate(requests):
        found = lab.fetched[request.ref.number]
        assert np.frombuffer(found["X"], np.float32).tolist() == (2 * floats(1, 4) + row)[0].tolist()
        assert np.frombuffer(found["Y"], np.float32).tolist() == [row] * 4
