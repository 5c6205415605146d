"""Calls of CUDA, on the fake: `tests/fake_cuda`."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from shm import cuda
from shm.cuda import BINDINGS_VARIABLE, HANDLE_BYTE_SIZE, Cuda, CudaError, CudaUnavailable, DeviceMemory
from tests.fake_cuda import driver, runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

# Exports 8 bytes, says their handle, and frees them at the end of its input.
EXPORTER = """
import ctypes, sys
from tests.fake_cuda import runtime
_, address = runtime.cudaMalloc(8)
ctypes.memmove(address, b"exported", 8)
_, handle = runtime.cudaIpcGetMemHandle(address)
print(ctypes.string_at(handle.getPtr(), 64).hex(), flush=True)
sys.stdin.read()
runtime.cudaFree(address)
"""


class Exporter:
    """A process that shares memory."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", EXPORTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.handle = bytes.fromhex(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    found = Exporter()
    yield found
    found.end()


@pytest.fixture
def devices() -> Cuda:
    return Cuda(runtime, driver)


def failing(**results: Any) -> types.SimpleNamespace:
    """Return the runtime, with functions that return these results."""
    names = {name: getattr(runtime, name) for name in dir(runtime) if name.startswith("cuda")}
    return types.SimpleNamespace(**names | {name: lambda *_, found=found: found for name, found in results.items()})


def test_memory_of_another_process_is_read_and_written(devices: Cuda, exporter: Exporter) -> None:
    memory = devices.open_handle(exporter.handle, 0)
    assert (memory.byte_size, memory.device_id) == (8, 0)
    found = bytearray(4)
    devices.copy_to_host(memory, 2, memoryview(found))
    assert found == b"port"
    devices.copy_from_host(memory, 6, b"!!")
    again = devices.open_handle(exporter.handle, 0)
    devices.close_handle(memory)
    whole = bytearray(8)
    devices.copy_to_host(again, 0, memoryview(whole))
    assert whole == b"export!!"
    devices.close_handle(again)
    with pytest.raises(CudaError, match="cudaIpcCloseMemHandle failed: cudaErrorInvalidValue"):
        devices.close_handle(again)


def test_a_handle_that_cannot_be_opened_has_a_reason(devices: Cuda, exporter: Exporter) -> None:
    _, own = runtime.cudaMalloc(1)
    _, handle = runtime.cudaIpcGetMemHandle(own)
    assert handle is not None
    exporter.end()
    its_bytes = ctypes.string_at(handle.getPtr(), HANDLE_BYTE_SIZE)
    reasons = {
        bytes(HANDLE_BYTE_SIZE): "it is no handle of a live allocation",
        exporter.handle: "the exporting process has freed the memory, or has ended",
        its_bytes: "the exporting process is this one, or in another PID namespace",
    }
    for raw, reason in reasons.items():
        with pytest.raises(CudaError) as failure:
            devices.open_handle(raw, 0)
        assert failure.value.reason.startswith(reason)
        assert not failure.value.is_sticky
    runtime.cudaFree(own)
    with pytest.raises(ValueError, match="a handle of 63 bytes, expected 64"):
        devices.open_handle(bytes(63), 0)
    with pytest.raises(CudaError, match="cudaSetDevice failed: cudaErrorInvalidDevice"):
        devices.open_handle(bytes(64), 1)


def test_memory_whose_size_is_not_known_is_closed_again(exporter: Exporter) -> None:
    closed: list[int] = []
    broken = failing(cuMemGetAddressRange=(driver.CUresult.CUDA_ERROR_INVALID_VALUE, None, None))
    watched = failing()

    def close(address: int) -> tuple[runtime.cudaError_t]:
        closed.append(address)
        return (runtime.cudaError_t.cudaSuccess,)

    watched.cudaIpcCloseMemHandle = close
    with pytest.raises(CudaError, match="cuMemGetAddressRange failed: CUDA_ERROR_INVALID_VALUE"):
        Cuda(watched, broken).open_handle(exporter.handle, 0)
    assert len(closed) == 1


def test_an_error_that_ends_the_context_is_known() -> None:
    class IllegalAddress(int):
        name = "cudaErrorIllegalAddress"

    devices = Cuda(failing(cudaStreamSynchronize=(IllegalAddress(700),)), driver)
    with pytest.raises(CudaError) as failure:
        devices.copy_from_host(DeviceMemory(0, 8, 0), 0, b"x")
    assert failure.value.is_sticky


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ((runtime.cudaError_t.cudaErrorNoDevice, 0), "no GPU is visible"),
        ((runtime.cudaError_t.cudaSuccess, 0), "no GPU is visible"),
        ((35, None), "the NVIDIA driver is not installed, or too old"),
        ((999, None), "the NVIDIA driver reports error 999"),
    ],
)
def test_no_gpu_is_told_with_what_is_missing(result: tuple[Any, Any], text: str) -> None:
    with pytest.raises(CudaUnavailable, match=text):
        Cuda(failing(cudaGetDeviceCount=result), driver)


def test_bindings_that_are_not_installed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("no_such_bindings", "tests.no_such_bindings"):
        monkeypatch.setenv(BINDINGS_VARIABLE, package)
        cuda.cuda.cache_clear()
        assert not cuda.is_installed()
        with pytest.raises(CudaUnavailable, match=r"cuda-bindings is not installed: pip install '\.\[gpu\]'"):
            cuda.cuda()
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    assert cuda.is_installed()
    assert cuda.cuda().device_count == 1
    cuda.cuda.cache_clear()
