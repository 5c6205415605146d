"""The functions of `cuda.bindings.driver` that clients and workers use."""

from __future__ import annotations

import enum
from typing import Any

from tests.fake_cuda import memory, runtime


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


def cuMemGetAddressRange(address: Any) -> tuple[CUresult, int | None, int | None]:
    found = memory.range_of(int(address))
    return (CUresult.CUDA_ERROR_INVALID_VALUE, None, None) if found is None else (CUresult.CUDA_SUCCESS, *found)


def cuDeviceGet(ordinal: int) -> tuple[CUresult, int]:
    return CUresult.CUDA_SUCCESS, ordinal


def cuDevicePrimaryCtxGetState(device: int) -> tuple[CUresult, int, int]:
    return CUresult.CUDA_SUCCESS, 0, int(device in runtime.contexts)


def cuGetErrorString(error: CUresult) -> tuple[CUresult, bytes]:
    return CUresult.CUDA_SUCCESS, error.name.encode()
