"""Capsules of memory on a GPU, read and made with ctypes: no library of tensors is needed."""

from __future__ import annotations

import ctypes
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.python import device_tensors, dlpack
from backends.python.device_tensors import GpuTensor, from_source, to_capsule
from backends.python.failures import TritonModelException
from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.tensors import DeviceArray
from backends.worker.memory import AttachedRegions
from shm.cuda import Cuda
from tests.fake_cuda import driver, memory, runtime

if TYPE_CHECKING:
    from collections.abc import Iterator


class Blocks:
    """The blocks of the fake device that a test has made. Tests before it may have left others."""

    def __init__(self) -> None:
        self._before = set(memory.own)

    def __len__(self) -> int:
        return len(set(memory.own) - self._before)


@pytest.fixture
def blocks() -> Blocks:
    return Blocks()


@pytest.fixture
def device(blocks: Blocks) -> Iterator[InstanceDevice]:
    made = InstanceDevice(Cuda(runtime, driver), 0, AttachedRegions())
    yield made
    made.synchronize()  # it keeps what is enqueued
    gc.collect()
    assert not blocks, "memory of the device was not freed"


class Library:
    """A tensor of another library, which notes the stream that it was asked for."""

    def __init__(self, array: DeviceArray, device: InstanceDevice, kind: int = device_tensors.CUDA) -> None:
        self.capsule: object = to_capsule(array, device, -1)
        self.kind = kind
        self.streams: list[int | None] = []

    def __dlpack__(self, *, stream: int | None = None) -> object:
        self.streams.append(stream)
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0


def uploaded(device: InstanceDevice, values: Any, datatype: str = "FP32") -> DeviceArray:
    array = device.upload(values, datatype, values.shape)
    device.synchronize()
    return array


@pytest.mark.parametrize("datatype", sorted(device_tensors.DLPACK_CODES))
def test_a_tensor_goes_out_and_comes_back_as_the_same_memory(
    device: InstanceDevice, blocks: Blocks, datatype: str
) -> None:
    array = device.upload(bytes(48), datatype, [2, 48 // 2 // DeviceArray(0, datatype, [1], 0).nbytes])
    found = from_source(to_capsule(array, device, None), device)
    assert found is not None
    assert (found.address, found.datatype, found.shape) == (array.address, datatype, array.shape)
    del array
    gc.collect()
    assert blocks, "the memory was freed while a tensor of it exists"


def test_memory_is_freed_when_a_capsule_that_nobody_has_used_is_dropped(device: InstanceDevice, blocks: Blocks) -> None:
    capsule = to_capsule(uploaded(device, np.zeros(4, np.float32)), device, -1)
    gc.collect()
    assert len(blocks) == 1
    del capsule
    gc.collect()
    assert not blocks
    assert not device_tensors._exported


def test_a_capsule_can_be_used_once(device: InstanceDevice) -> None:
    capsule = to_capsule(uploaded(device, np.zeros(4, np.float32)), device, -1)
    assert from_source(capsule, device) is not None
    assert from_source(capsule, device) is None


def test_a_library_computes_its_tensor_before_what_the_instance_does(device: InstanceDevice) -> None:
    library = Library(uploaded(device, np.zeros(4, np.float32)), device)
    assert from_source(library, device) is not None
    assert library.streams == [device.stream]


def test_a_consumer_waits_on_its_stream_for_what_the_instance_has_enqueued(device: InstanceDevice) -> None:
    _, stream = runtime.cudaStreamCreate()
    array = device.upload(np.array([7], np.float32), "FP32", [1])
    assert from_source(to_capsule(array, device, int(stream)), device) is not None
    runtime.cudaStreamSynchronize(stream)
    assert ctypes.string_at(array.address, 4) == np.float32(7).tobytes()


def test_what_is_not_on_a_gpu_is_for_others(device: InstanceDevice) -> None:
    library = Library(uploaded(device, np.zeros(4, np.float32)), device, kind=1)
    for source in (library, np.zeros(3), object()):
        assert from_source(source, device) is None


def test_what_a_model_cannot_give_is_an_error(device: InstanceDevice) -> None:
    capsule = to_capsule(uploaded(device, np.zeros((2, 3), np.float32)), device, -1)
    managed = device_tensors._DlManagedTensor.from_address(device_tensors._pointer(capsule, b"dltensor"))
    strides = (ctypes.c_int64 * 2)(1, 2)
    managed.tensor.strides = strides
    with pytest.raises(TritonModelException, match="DLPack tensor is not contiguous"):
        from_source(capsule, device)
    managed.tensor.strides, managed.tensor.bits = None, 24
    with pytest.raises(TritonModelException, match="DLDataType is not supported"):
        from_source(capsule, device)


def test_consumers_may_ask_for_a_version_a_device_and_a_copy(device: InstanceDevice) -> None:
    values = np.arange(6, dtype=np.float32)
    tensor = GpuTensor.of("OUT", uploaded(device, values), device)
    same = from_source(tensor.__dlpack__(stream=-1, max_version=(1, 1), dl_device=(2, 0), copy=None), device)
    assert same is not None
    assert same.address == tensor._on_device.address
    copied = from_source(tensor.__dlpack__(stream=-1, max_version=(1, 1), copy=True), device)
    assert copied is not None
    assert copied.address != tensor._on_device.address
    assert device.to_host(copied).tolist() == values.tolist()
    on_host, _ = dlpack.from_capsule(tensor.__dlpack__(max_version=(1, 1), dl_device=(1, 0)))
    assert on_host.tolist() == values.tolist()
    for wanted, copy in (((1, 0), False), ((2, 1), None)):
        with pytest.raises(BufferError, match="tensor 'OUT' is on GPU 0"):
            tensor.__dlpack__(dl_device=wanted, copy=copy)
