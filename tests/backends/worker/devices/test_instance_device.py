"""The device of an instance, on the fake, whose streams do nothing before they are waited for."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.reshape import TensorShapes
from backends.transport import wire
from backends.worker.devices.batch_on_device import joined
from backends.worker.devices.device_tensors import DeviceOutputs
from backends.worker.devices.instance_device import InstanceDevice
from backends.worker.devices.staging import StagingLimits
from backends.worker.devices.tensors import DeviceArray, DeviceInput
from backends.worker.memory import AttachedRegions
from backends.worker.request import WorkerRequest
from kernel.errors import InternalError, InvalidArgument, Unavailable
from shm.cuda import Cuda, CudaError, DeviceMemory
from shm.tensor import RequestedOutput, Span, Tensor
from tests.fake_cuda import driver, memory, runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from backends.worker.devices.batch_on_device import EnqueuedBatch

SPECS = {"IN": TensorShapes("IN", "FP32", (-1,), batched=True)}


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    gc.collect()  # what other tests have left
    before = set(memory.own)
    runtime.pinned.clear()
    yield Cuda(runtime, driver)
    gc.collect()  # arrays and their owners refer to one another in tracebacks
    assert set(memory.own) == before, "memory of the device was not freed"


def device_with(cuda: Cuda, pinned: int = 1 << 20, kept: int = 1 << 20) -> InstanceDevice:
    return InstanceDevice(cuda, 0, AttachedRegions(), StagingLimits(pinned, kept))


def request(*inputs: Any) -> WorkerRequest:
    return WorkerRequest(wire.RequestMessage(1, []), list(inputs), None)  # type: ignore[arg-type]  # nobody responds


def on_host(values: Sequence[Sequence[float]]) -> Tensor:
    array = np.array(values, np.float32)
    return Tensor("IN", "FP32", list(array.shape), array.tobytes())


def on_device(device: InstanceDevice, values: Sequence[Sequence[float]]) -> DeviceInput:
    array = np.array(values, np.float32)
    found = device.upload(array, "FP32", array.shape)
    device.synchronize()
    return DeviceInput("IN", found, lambda: memoryview(array.tobytes()))


def values_at(array: DeviceArray) -> Any:
    """What a kernel on the device would see now."""
    raw = ctypes.string_at(array.address, array.nbytes)
    return np.frombuffer(raw, np.float32).reshape(array.shape).tolist()


def test_a_batch_is_gathered_in_one_block_with_one_copy_when_the_stream_was_waited_for(cuda: Cuda) -> None:
    device = device_with(cuda)
    batch = [request(on_host([[1, 2]])), request(on_host([[3, 4], [5, 6]]))]
    found = device.gather(batch, SPECS)["IN"]
    assert found.shape == (3, 2)
    assert device.pending
    assert values_at(found) != [[1, 2], [3, 4], [5, 6]], "the stream has not been waited for"
    device.synchronize()
    assert not device.pending
    assert values_at(found) == [[1, 2], [3, 4], [5, 6]]
    assert (device.copies, device.copied_byte_size) == (1, 24)


def test_the_next_batch_waits_for_the_copies_of_the_last_one(cuda: Cuda) -> None:
    device = device_with(cuda)
    first = device.gather([request(on_host([[1, 1]])), request(on_host([[2, 2]]))], SPECS)["IN"]
    kept = DeviceArray(device.allocate(16).address, "FP32", (2, 2), 0)
    block = device.allocate(16)
    device.enqueue(block.address, first.address, 16, crosses=False)
    device.gather([request(on_host([[7, 7]])), request(on_host([[8, 8]]))], SPECS)
    assert values_at(DeviceArray(block.address, "FP32", (2, 2), 0)) == [[1, 1], [2, 2]]
    del kept


def test_the_only_input_of_a_batch_stays_where_it_is_on_the_device(cuda: Cuda) -> None:
    device = device_with(cuda)
    given = on_device(device, [[1, 2]])
    device.copies = 0
    found = device.gather([request(given)], SPECS, alignment=1)["IN"]
    assert (found.address, device.copies, device.pending) == (given.address, 0, False)
    moved = DeviceInput("IN", DeviceArray(given.address + 4, "FP32", (1, 1), 0, given.array), lambda: memoryview(b""))
    copied = device.gather([request(moved)], SPECS)["IN"]
    device.synchronize()
    assert copied.address % 256 == 0 or copied.address != moved.address
    assert values_at(copied) == [[2]]
    assert device.copies == 0, "a copy within the device was counted as one of the host"


def test_inputs_on_the_host_and_on_the_device_may_be_in_one_batch(cuda: Cuda) -> None:
    device = device_with(cuda)
    batch = [request(on_host([[1]])), request(on_device(device, [[2]])), request(on_host([[3]]))]
    found = device.gather(batch, SPECS)["IN"]
    device.synchronize()
    assert values_at(found) == [[1], [2], [3]]


@pytest.mark.parametrize(("pinned", "kept"), [(0, 0), (0, 1 << 20), (1 << 20, 0)])
def test_a_batch_above_the_limits_is_gathered_all_the_same(cuda: Cuda, pinned: int, kept: int) -> None:
    device = device_with(cuda, pinned, kept)
    for start in (0, 10):
        rows = [[float(start + number)] * 3 for number in range(4)]
        found = device.gather([request(on_host([row])) for row in rows], SPECS)["IN"]
        device.synchronize()
        assert values_at(found) == rows
    assert bool(runtime.pinned) == bool(pinned)


def test_strings_are_left_out_and_errors_are_those_of_gathering_on_the_host(cuda: Cuda) -> None:
    device = device_with(cuda)
    text = Tensor("S", "BYTES", [1, 1], b"\1\0\0\0x")
    assert list(device.gather([request(on_host([[1]]), text)], SPECS)) == ["IN"]
    with pytest.raises(InternalError, match="different shapes in requests of one batch"):
        device.gather([request(on_host([[1]])), request(on_host([[1, 2]]))], SPECS)
    with pytest.raises(InternalError, match="must have the same inputs"):
        device.gather([request(on_host([[1]])), request()], SPECS)
    with pytest.raises(InvalidArgument, match="does not hold a tensor of shape"):
        device.gather([request(Tensor("IN", "FP32", [1, 2], b"1234"))], SPECS)


def test_an_output_on_the_device_is_in_its_response_after_the_wait(cuda: Cuda) -> None:
    device = device_with(cuda)
    outputs = DeviceOutputs(device, AttachedRegions(), waits_at_once=False)
    array = device.upload(np.array([1, 2], np.float32), "FP32", [2])
    tensor = outputs.write(None, "OUT", "FP32", array, RequestedOutput("OUT"))  # type: ignore[arg-type]  # inline
    assert outputs.pending
    assert bytes(tensor.data or b"") == bytes(8)
    outputs.wait()
    assert np.frombuffer(tensor.data or b"", np.float32).tolist() == [1, 2]


def test_another_stream_is_waited_for_where_that_was_asked(cuda: Cuda) -> None:
    device = device_with(cuda)
    _, other = runtime.cudaStreamCreate()
    source, target = device.allocate(4), device.allocate(4)
    ctypes.memmove(source.address, b"late", 4)
    runtime.cudaMemcpyAsync(target.address, source.address, 4, 3, other)
    device.synchronize()
    assert ctypes.string_at(target.address, 4) != b"late"
    device.after(int(other))
    device.synchronize()
    assert ctypes.string_at(target.address, 4) == b"late"


def test_memory_that_is_not_there_is_an_error_of_the_request(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_with(cuda)
    failing = lambda _: (runtime.cudaError_t.cudaErrorMemoryAllocation, None)  # noqa: E731 - a function of CUDA
    monkeypatch.setattr(runtime, "cudaMalloc", failing)
    with pytest.raises(InternalError, match=r"GPU 0: 64 bytes of memory cannot be allocated: cudaMalloc failed"):
        device.allocate(64)


def test_a_device_that_is_not_there_is_refused(cuda: Cuda) -> None:
    with pytest.raises(Unavailable, match="GPU 1 does not exist: this process sees 1"):
        InstanceDevice(cuda, 1, AttachedRegions())


def test_rows_and_other_shapes_of_a_tensor_on_the_device_are_the_same_memory() -> None:
    array = DeviceArray(1000, "FP16", (4, 3), 0)
    assert (array.nbytes, array.ndim) == (24, 2)
    rows = array[1:3]
    assert (rows.address, rows.shape) == (1006, (2, 3))
    assert array.reshape([2, -1]).shape == (2, 6)
    assert array.reshape(-1).shape == (12,)
    with pytest.raises(ValueError, match="cannot reshape"):
        array.reshape([5, 2])
    with pytest.raises(ValueError, match="must follow one another"):
        array[::2]


@pytest.mark.parametrize("instance", [0, 1])
def test_a_thread_keeps_its_device_when_memory_of_another_one_is_used(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, instance: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    cuda = Cuda(runtime, driver)
    InstanceDevice(cuda, instance, AttachedRegions())
    address = cuda.allocate(16, 1 - instance)
    cuda.use(instance)
    content = bytearray(16)
    cuda.copy_to_host(DeviceMemory(address, 16, 1 - instance), 0, memoryview(content))
    with pytest.raises(CudaError, match="cudaIpcOpenMemHandle"):
        cuda.open_handle(bytes(64), 1 - instance)
    cuda.free(address, 1 - instance)
    assert runtime.cudaGetDevice()[1] == instance
    runtime.cudaSetDevice(0)


def test_an_output_has_no_final_place_at_an_address_where_libraries_cannot_store_vectors(cuda: Cuda) -> None:
    device = device_with(cuda)
    block = device.allocate(4096)

    class Region:
        def device_memory(self) -> DeviceMemory:
            return DeviceMemory(block.address, 4096, 0)

    class Regions:
        def find(self, number: int) -> Region:
            return Region()

    device._regions = Regions()  # type: ignore[assignment]  # `find`

    def place(offset: int) -> DeviceArray | None:
        span = Span(RegionLease(7), offset, 16)  # type: ignore[arg-type]  # its number
        wanted = wire.RequestMessage(1, [], outputs=[RequestedOutput("OUT", span=span)])
        return device.reserve(WorkerRequest(wanted, [], None), "OUT", "FP32", (1, 4))  # type: ignore[arg-type]

    base = -block.address % 256
    aligned = place(base)
    assert aligned is not None
    assert aligned.address % 256 == 0
    assert place(base + 16) is None


class RegionLease:
    def __init__(self, number: int) -> None:
        self.region_number = number


def test_the_default_stream_of_the_instance_s_device_is_meant_in_threads_that_have_another_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    device = InstanceDevice(Cuda(runtime, driver), 1, AttachedRegions(), StagingLimits())
    seen: list[int] = []

    def of_a_model() -> None:  # a new thread has device 0
        runtime.cudaSetDevice(0)  # it works with it
        device.after(1)
        device.before(1)
        seen.append(runtime.cudaGetDevice()[1])

    thread = threading.Thread(target=of_a_model)
    thread.start()
    thread.join()
    device.synchronize()
    assert seen == [0], "the thread's current device was changed"
    runtime.cudaSetDevice(0)


def test_an_instance_on_another_gpu_makes_no_context_of_the_first_one_in_any_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context takes half a gigabyte of GPU 0 for each worker, and threads begin with device 0."""
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    runtime.forget_work()
    runtime.contexts.clear()

    def in_a_new_thread(work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def load() -> None:
        device = InstanceDevice(Cuda(runtime, driver), 1, AttachedRegions(), StagingLimits(1 << 20, 1 << 20))
        device.select()
        devices.append(device)

    devices: list[InstanceDevice] = []
    arrays: list[DeviceArray] = []
    batches: list[EnqueuedBatch] = []
    in_a_new_thread(load)
    (device,) = devices
    in_a_new_thread(lambda: arrays.append(device.upload(np.zeros(4, np.float32), "FP32", [4])))
    data = bytearray(16)
    in_a_new_thread(lambda: device.fetch(arrays[0], data))
    in_a_new_thread(lambda: device.copy_to(arrays[0], memoryview(data)))
    in_a_new_thread(lambda: device.after(1))
    in_a_new_thread(device.synchronize)
    in_a_new_thread(lambda: device.finish_readers([7]))
    in_a_new_thread(device.begin_overlapping)
    in_a_new_thread(lambda: batches.append(device.end_overlapping()))
    in_a_new_thread(batches[0].wait)
    in_a_new_thread(arrays.clear)  # its memory is freed
    in_a_new_thread(device.close)
    assert runtime.contexts == {1}


def test_a_thread_that_works_with_another_gpu_goes_back_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    device = InstanceDevice(Cuda(runtime, driver), 1, AttachedRegions(), late=True)
    seen = []

    def of_a_model() -> None:
        runtime.cudaSetDevice(0)
        device.allocate(64).free()
        device.synchronize()
        seen.append(runtime.cudaGetDevice()[1])

    thread = threading.Thread(target=of_a_model)
    thread.start()
    thread.join()
    assert seen == [0]


def test_small_outputs_of_a_batch_are_fetched_with_one_copy_and_one_wait(cuda: Cuda) -> None:
    device = device_with(cuda)
    values = np.arange(64, dtype=np.float32).reshape(32, 2)
    array = device.upload(values, "FP32", values.shape)
    device.synchronize()
    stream = cuda.stream_of(device.stream)
    waits, device.copies = stream.waits, 0
    fetched = [bytearray(8) for _ in range(32)]
    for row, data in enumerate(fetched):
        device.fetch(array[row : row + 1], data)
    assert device.pending
    assert all(not any(data) for data in fetched), "nothing was waited for"
    device.synchronize()
    assert [np.frombuffer(data, np.float32).tolist() for data in fetched] == values.tolist()
    assert (device.copies, stream.waits - waits) == (1, 1)


def test_small_outputs_without_pinned_memory_are_copied_each(cuda: Cuda) -> None:
    device = device_with(cuda, pinned=0)
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    array = device.upload(values, "FP32", values.shape)
    fetched = [bytearray(8), bytearray(8)]
    for row, data in enumerate(fetched):
        device.fetch(array[row : row + 1], data)
    device.synchronize()
    assert [np.frombuffer(data, np.float32).tolist() for data in fetched] == values.tolist()


def test_outputs_in_different_memory_are_not_fetched_with_one_copy() -> None:
    """Two allocations can be neighbours, and CUDA does not say that a copy may reach across both."""
    runs, offsets = joined([(1, 1000, 8), (2, 1008, 8), (1, 992, 8)])
    assert [(run.source, run.byte_size, run.offset) for run in runs] == [(992, 16, 0), (1008, 8, 16)]
    assert offsets == [8, 16, 0]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=20))
def test_joined_copies_hold_every_output_and_do_not_overlap_in_the_block(places: list[tuple[int, int, int]]) -> None:
    runs, offsets = joined(places)
    memory_of_device = bytes(index % 251 for index in range(6000))
    block = bytearray(runs[-1].offset + runs[-1].byte_size)
    end = 0
    for run in runs:
        assert run.offset >= end
        end = run.offset + run.byte_size
        block[run.offset : end] = memory_of_device[run.source : run.source + run.byte_size]
    for (_, address, byte_size), offset in zip(places, offsets, strict=True):
        assert block[offset : offset + byte_size] == memory_of_device[address : address + byte_size]


def test_inputs_that_the_worker_makes_are_in_the_block_of_the_batch(cuda: Cuda) -> None:
    device = device_with(cuda)
    counts = np.array([1, 2], np.int32)
    found = device.gather([request(on_host([[1, 2]]))], SPECS, computed={"COUNTS": ("INT32", counts)})
    allocated = len(memory.own)
    device.synchronize()
    assert ctypes.string_at(found["COUNTS"].address, 8) == counts.tobytes()
    found = device.gather([request(on_host([[3, 4]]))], SPECS, computed={"COUNTS": ("INT32", counts)})
    device.synchronize()
    assert len(memory.own) == allocated, "memory was allocated for the second batch"


def test_short_waits_are_polled_and_the_next_wait_after_a_long_one_is_not(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = device_with(cuda)
    queries: list[int] = []

    def done_at_the_third(event: Any) -> tuple[int]:
        queries.append(1)
        return (0 if len(queries) == 3 else 600,)

    monkeypatch.setattr(runtime, "cudaEventQuery", done_at_the_third)
    waited: list[object] = []

    def wait(event: object) -> tuple[int]:
        waited.append(event)
        return (0,)

    monkeypatch.setattr(runtime, "cudaEventSynchronize", wait)
    device.synchronize()
    assert (len(queries), waited) == (3, [])
    device._waited_ns = device.poll_ns + 1
    device.synchronize()
    assert (len(queries), len(waited)) == (3, 1)
    device.cuda.stream_of(device.stream).run()


def test_a_device_that_is_opened_late_makes_nothing_before_it_is_needed(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    use = runtime.cudaSetDevice

    def counted(device: int) -> tuple[runtime.cudaError_t]:
        calls.append(device)
        return use(device)

    monkeypatch.setattr(runtime, "cudaSetDevice", counted)
    before = len(runtime.streams)
    device = InstanceDevice(cuda, 0, AttachedRegions(), StagingLimits(1 << 20, 1 << 20), late=True)
    assert (calls, len(runtime.streams), device.pending) == ([], before, False)
    found = device.gather([request(on_host([[1, 2]]))], SPECS)["IN"]
    device.synchronize()
    assert values_at(found) == [[1, 2]]
    assert len(runtime.streams) == before + 1
