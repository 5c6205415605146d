"""The GPUs of the server: how they are found, and how workers number them."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from backends.supervision.gpus import FoundDevices
from kernel.errors import Unavailable
from kernel.observe.gpu_figures import FoundGpu, FoundGpus
from kernel.repository.gpus import GpuSettings

if TYPE_CHECKING:
    from backends.helper.process import Helper

GPU = FoundGpu("H200", "GPU-1", (9, 0), 1 << 30)


class FindingHelper:
    """Answers the question for GPUs."""

    def __init__(self, *results: FoundGpus | Unavailable) -> None:
        self.results = list(results)

    async def run(self, task: object) -> tuple[bytes, None]:
        result = self.results.pop(0)
        if isinstance(result, Unavailable):
            raise result
        return msgspec.json.encode(result), None


def devices_with(*results: FoundGpus | Unavailable) -> FoundDevices:
    return FoundDevices(cast("Helper", FindingHelper(*results)), GpuSettings())


@pytest.mark.parametrize(
    "first",
    [
        FoundGpus(unavailable="the NVIDIA driver reports error 802", is_passing=True),
        Unavailable("took more than 120 s"),
    ],
    ids=["the driver is starting", "the driver hangs"],
)
def test_a_driver_that_cannot_answer_yet_is_asked_again_later(
    first: FoundGpus | Unavailable, caplog: pytest.LogCaptureFixture
) -> None:
    devices = devices_with(first, FoundGpus([GPU]))

    async def run() -> None:
        assert (await devices.usable()).ids == ()
        assert (await devices.usable()).ids == (), "it was asked again at once"
        devices._again_s = 0.0
        assert (await devices.usable()).ids == (0,)

    asyncio.run(run())
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "no GPU can be used yet" in warnings[0]


def test_a_machine_without_gpus_is_asked_once() -> None:
    devices = devices_with(FoundGpus(unavailable="no GPU is visible"))

    async def run() -> None:
        for _ in range(2):
            assert (await devices.usable()).ids == ()

    asyncio.run(run())


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"])
def test_parts_of_gpus_that_an_operator_has_chosen_are_not_renamed(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    devices = devices_with(FoundGpus([GPU]))
    asyncio.run(devices.usable())
    assert devices.visible == "GPU-1"
    monkeypatch.setenv(variable, "MIG-0f5a")
    assert devices.visible == ""


def test_parts_of_gpus_that_the_driver_names_are_not_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    devices = devices_with(FoundGpus([msgspec.structs.replace(GPU, is_mig=True)]))
    asyncio.run(devices.usable())
    assert devices.visible == ""


def test_a_backend_that_cannot_use_gpus_is_known_to_later_loads_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    devices = devices_with(FoundGpus([GPU]))

    async def run() -> None:
        assert (await devices.usable()).unusable_by == frozenset()
        assert devices.obstacle_of("onnxruntime") is None
        for _ in range(2):
            devices.note("onnxruntime", "it is for the CPU")
        devices.note("pytorch", "")
        assert devices.obstacle_of("pytorch") == ""
        assert devices.obstacle_of("onnxruntime") == "it is for the CPU"
        assert (await devices.usable()).unusable_by == {"onnxruntime"}

    asyncio.run(run())
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [
        "models of backend 'onnxruntime' run on the CPU unless their configuration says KIND_GPU: it is for the CPU"
    ]
