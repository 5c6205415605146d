"""A device whose outputs are sent to regions of clients, with its calls of CUDA counted."""

from __future__ import annotations

import collections
import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest

from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.staging import StagingLimits
from backends.worker.devices.tensors import DeviceArray
from shm.cuda import Cuda
from tests.backends.device_lab import DeviceLab
from tests.fake_cuda import driver, runtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from backends.worker.request import OutputValue, WorkerRequest


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
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[collections.Counter[str]]:
    """Counts the calls of this thread from now on: threads of tests before may still look whether there is a device.

    What these tests have left is collected before, and not meanwhile: memory of devices is freed then.
    """
    gc.collect()
    gc.disable()
    counter: collections.Counter[str] = collections.Counter()
    thread = threading.get_ident()

    def counted(name: str) -> None:
        function = getattr(runtime, name)

        def call(*arguments: Any) -> Any:
            counter[name] += threading.get_ident() == thread
            return function(*arguments)

        monkeypatch.setattr(runtime, name, call)

    for name in dir(runtime):
        if name.startswith("cuda") and callable(getattr(runtime, name)) and name != "cudaStream_t":
            if isinstance(getattr(runtime, name), type):
                continue
            counted(name)
    yield counter
    gc.enable()


def waited(calls: collections.Counter[str]) -> dict[str, int]:
    """Return the calls, without those that ask whether the wait is over."""
    return {name: count for name, count in calls.items() if count and name != "cudaEventQuery"}
