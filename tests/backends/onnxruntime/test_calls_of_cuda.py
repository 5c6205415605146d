"""How many calls of CUDA a batch makes beside ONNX Runtime's own: each takes time of the processor and of the GPU."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.staging import StagingLimits
from backends.worker.devices.tensors import DeviceArray
from shm.cuda import Cuda
from shm.tensor import RequestedOutput
from tests.backends.add_sub_batch import floats
from tests.backends.device_lab import DeviceLab, at
from tests.backends.onnxruntime.test_on_device import loaded, models, ort
from tests.fake_cuda import driver, runtime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.worker.request import OutputValue, WorkerRequest
    from tests.backends.onnxruntime.conftest import OnnxModels
    from tests.fake_onnxruntime import FakeOnnxRuntime

__all__ = ["models", "ort"]


class SendingLab(DeviceLab):
    """Writes outputs as the worker does: those in regions are there, small ones are fetched with the wait."""

    def __init__(self) -> None:
        super().__init__()
        limits = StagingLimits(pinned_byte_size=1 << 20, kept_byte_size=1 << 20)
        self.instance_device = InstanceDevice(Cuda(runtime, driver), 0, self, limits)  # type: ignore[arg-type]  # `find`
        self.fetched: dict[int, dict[str, bytearray]] = {}

    def respond(
        self,
        request: WorkerRequest,
        outputs: Sequence[OutputValue],
        parameters: Mapping[str, str | int | bool],
        final: bool,
    ) -> None:
        places = {address for address, _ in self.regions.values()}
        for output in outputs:
            assert isinstance(output.array, DeviceArray)
            if output.array.address not in places:
                data = bytearray(output.array.nbytes)
                self.instance_device.fetch(output.array, data)
                self.fetched.setdefault(request.ref.number, {})[output.name] = data
        request.finished = True


@pytest.fixture
def lab() -> SendingLab:
    return SendingLab()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Counts the calls from now on."""
    counter: collections.Counter[str] = collections.Counter()

    def counted(name: str) -> None:
        function = getattr(runtime, name)

        def call(*arguments: Any) -> Any:
            counter[name] += 1
            return function(*arguments)

        monkeypatch.setattr(runtime, name, call)

    for name in dir(runtime):
        if name.startswith("cuda") and callable(getattr(runtime, name)) and name != "cudaStream_t":
            if isinstance(getattr(runtime, name), type):
                continue
            counted(name)
    return counter


def waited(calls: collections.Counter[str]) -> dict[str, int]:
    """Return the calls, without those that ask whether the wait is over."""
    return {name: count for name, count in calls.items() if name != "cudaEventQuery"}


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
