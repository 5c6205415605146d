"""The functions of `cuda.bindings.runtime` that clients and workers use.

Copies on a stream are made when the stream is waited for: who forgets that gets old bytes.
"""

from __future__ import annotations

import ctypes
import enum
import os
from typing import Any

from tests.fake_cuda import memory

CUDA_IPC_HANDLE_SIZE = 64
cudaIpcMemLazyEnablePeerAccess = 1
cudaStreamNonBlocking = 1


class cudaError_t(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorDeviceUninitialized = 201
    cudaErrorInvalidResourceHandle = 400


class cudaMemcpyKind(enum.IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3
    cudaMemcpyDefault = 4


class cudaDeviceAttr(enum.IntEnum):
    cudaDevAttrUnifiedAddressing = 41
    cudaDevAttrIpcEventSupport = 125


_SUCCESS = cudaError_t.cudaSuccess
_OK = (_SUCCESS,)
_INVALID = (cudaError_t.cudaErrorInvalidValue, None)
_device = 0


class cudaIpcMemHandle_t:
    """The 64 bytes, at an address."""

    def __init__(self) -> None:
        self._bytes = (ctypes.c_char * CUDA_IPC_HANDLE_SIZE)()

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


class Stream:
    """Copies that are not made yet."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []

    def getPtr(self) -> int:
        return id(self)


def cudaGetDeviceCount() -> tuple[cudaError_t, int]:
    count = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
    return (_SUCCESS, count) if count else (cudaError_t.cudaErrorNoDevice, 0)


def cudaGetDevice() -> tuple[cudaError_t, int]:
    return _SUCCESS, _device


def cudaSetDevice(device: int) -> tuple[cudaError_t]:
    global _device
    if not 0 <= device < cudaGetDeviceCount()[1]:
        return (cudaError_t.cudaErrorInvalidDevice,)
    _device = device
    return _OK


def cudaMalloc(byte_size: int) -> tuple[cudaError_t, int | None]:
    try:
        return _SUCCESS, memory.allocate(byte_size, _device)
    except OSError:
        return cudaError_t.cudaErrorMemoryAllocation, None


def cudaFree(address: Any) -> tuple[cudaError_t]:
    return _OK if memory.free(int(address)) else _INVALID[:1]


def cudaIpcGetMemHandle(address: Any) -> tuple[cudaError_t, cudaIpcMemHandle_t | None]:
    raw = memory.handle_of(int(address))
    if raw is None:
        return _INVALID
    handle = cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), raw, CUDA_IPC_HANDLE_SIZE)
    return _SUCCESS, handle


def cudaIpcOpenMemHandle(handle: cudaIpcMemHandle_t, flags: int) -> tuple[cudaError_t, int | None]:
    if flags != cudaIpcMemLazyEnablePeerAccess:
        return _INVALID
    try:
        return _SUCCESS, memory.open_handle(ctypes.string_at(handle.getPtr(), CUDA_IPC_HANDLE_SIZE))
    except PermissionError:
        return cudaError_t.cudaErrorDeviceUninitialized, None
    except OSError:
        return cudaError_t.cudaErrorInvalidResourceHandle, None
    except ValueError:
        return _INVALID


def cudaIpcCloseMemHandle(address: Any) -> tuple[cudaError_t]:
    return _OK if memory.close_handle(int(address)) else _INVALID[:1]


def cudaMemcpyAsync(target: Any, source: Any, byte_size: int, kind: Any, stream: Any) -> tuple[cudaError_t]:
    copy = _address(target), _address(source), byte_size
    if isinstance(stream, Stream):
        stream.copies.append(copy)
    else:
        ctypes.memmove(*copy)
    return _OK


def cudaMemcpy(target: Any, source: Any, byte_size: int, kind: Any) -> tuple[cudaError_t]:
    return cudaMemcpyAsync(target, source, byte_size, kind, None)


def cudaStreamCreate() -> tuple[cudaError_t, Stream]:
    return _SUCCESS, Stream()


def cudaStreamCreateWithFlags(flags: int) -> tuple[cudaError_t, Stream]:
    return cudaStreamCreate()


def cudaStreamSynchronize(stream: Any) -> tuple[cudaError_t]:
    if isinstance(stream, Stream):
        for copy in stream.copies:
            ctypes.memmove(*copy)
        stream.copies.clear()
    return _OK


def cudaStreamDestroy(stream: Any) -> tuple[cudaError_t]:
    return _OK


def cudaDeviceGetAttribute(attribute: Any, device: int) -> tuple[cudaError_t, int]:
    return _SUCCESS, 1


def cudaGetErrorString(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    return _SUCCESS, error.name.encode()


def cudaGetLastError() -> tuple[cudaError_t]:
    return _OK


def _address(value: Any) -> int:
    """Return the address of what the functions of cuda-bindings take: an address, an array of ctypes, bytes."""
    if isinstance(value, ctypes.Array):
        return ctypes.addressof(value)
    if isinstance(value, bytes):
        return ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value or 0
    return int(value)
