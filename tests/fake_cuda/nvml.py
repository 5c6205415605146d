"""The functions of `pynvml` that the device helper uses, for the fake devices. `NAIAD_NVML=tests.fake_cuda.nvml`."""

from __future__ import annotations

import itertools
import os
import types
from typing import Any

from tests.fake_cuda.runtime import TOTAL_BYTE_SIZE, cudaGetDeviceCount

_reads = itertools.count()


class NVMLError(Exception):
    """An error of the driver."""


class NVMLError_NotFound(NVMLError):
    """There is no such GPU."""


def nvmlInit() -> None:
    if os.environ.get("FAKE_NVML_FAILS"):
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    number = int(uuid[-2:], 16)
    if not uuid.startswith("GPU-") or number >= cudaGetDeviceCount()[1]:
        raise NVMLError_NotFound("Not Found")
    return number


def nvmlDeviceGetMigMode(handle: int) -> list[int]:
    if handle == 1:
        raise NVMLError("Not Supported")  # as GPUs that have no parts say
    return [int(os.environ.get("FAKE_NVML_MIG", "0"))] * 2


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    return types.SimpleNamespace(gpu=25, memory=50)


def nvmlDeviceGetMemoryInfo(handle: int, version: int = 0) -> Any:
    used = int(os.environ.get("FAKE_CUDA_USED", "0"))
    return types.SimpleNamespace(total=TOTAL_BYTE_SIZE, used=used, free=TOTAL_BYTE_SIZE - used, reserved=1 << 20)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 120_500


def nvmlDeviceGetPowerManagementLimit(handle: int) -> int:
    return 700_000


def nvmlDeviceGetTotalEnergyConsumption(handle: int) -> int:
    """Rises by 2 J with each read. The second device does not know it."""
    if handle == 1:
        raise NVMLError("Not Supported")
    return 5_000_000 + 2000 * next(_reads)
