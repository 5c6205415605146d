"""What the device helper finds out about GPUs, on the fake driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from backends.helper import device_tasks
from kernel.observe.gpu_figures import FoundGpus
from shm.cuda import BINDINGS_VARIABLE, cuda
from tests.fake_cuda import runtime

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv(device_tasks.NVML_VARIABLE, "tests.fake_cuda.nvml")
    monkeypatch.setattr(device_tasks, "_initialised", [])
    cuda.cache_clear()
    yield
    cuda.cache_clear()


def found() -> FoundGpus:
    steps = device_tasks.find_gpus(b"", [])
    with pytest.raises(StopIteration) as end:
        next(steps)
    return msgspec.json.decode(end.value.value.message, type=FoundGpus)


def test_gpus_have_a_name_and_say_whether_they_are_parts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    assert [(gpu.name, gpu.capability, gpu.is_mig) for gpu in found().gpus] == [("Fake GPU", (9, 0), False)] * 2
    monkeypatch.setenv("FAKE_NVML_MIG", "1")
    assert [gpu.is_mig for gpu in found().gpus] == [True, False], "the second cannot have parts"


def test_without_nvml_no_gpu_is_taken_for_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_FAILS", "1")
    assert [gpu.is_mig for gpu in found().gpus] == [False]


@pytest.mark.parametrize(("code", "passes"), [(802, True), (3, True), (35, False), (100, False)])
def test_a_driver_that_is_starting_is_told_from_one_that_is_not_there(
    code: int, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (code, None))
    assert found().is_passing is passes
    monkeypatch.undo()
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    assert found().gpus, "the driver was not asked again"


def test_an_old_driver_is_explained_with_the_versions_that_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (35, None))
    text = found().unavailable
    assert "needs R580 or newer" in text
    assert "gpu-cuda12) R525" in text
