"""Tensors between workers on a device: where they are left, and when their memory is given back.

On the fake, whose streams do nothing before they are waited for.
"""

from __future__ import annotations

import ctypes
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.python.device_tensors import to_capsule
from backends.transport import wire
from backends.worker.devices import device_memory
from backends.worker.devices.device_memory import (
    DeviceArenas,
    DeviceRegion,
    OwnDeviceRegion,
    SharedArenas,
    arena_byte_size,
)
from backends.worker.devices.device_tensors import DeviceInputs, DeviceOutputs
from backends.worker.devices.instance_device import DeviceBlock, InstanceDevice
from backends.worker.devices.staging import StagingLimits
from backends.worker.held_inputs import HeldInputs
from backends.worker.inputs import InputReader
from backends.worker.memory import AttachedRegions, CopyBuffers
from backends.worker.output_memory import ArenaOutputs
from backends.worker.outputs import OutputWriter
from backends.worker.request import OutputValue, WorkerRequest
from kernel.errors import InvalidArgument
from shm.cuda import Cuda
from shm.lease import RegionNumber
from shm.tensor import RequestedOutput, Span, Tensor
from tests.fake_cuda import driver, memory, runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from backends.worker.devices.tensors import DeviceArray

MIB = 1 << 20
VALUES = np.arange(4096, dtype=np.float32)


@pytest.fixture(autouse=True)
def _no_memory_is_left() -> Iterator[None]:
    runtime.forget_work()
    gc.collect()  # what other tests have left
    before = set(memory.own)
    yield
    gc.collect()
    assert set(memory.own) <= before, "memory of the device was not freed"


class Bench:
    """Arenas of a worker, with what it sends."""

    def __init__(self, pool: int = 8 * MIB) -> None:
        self.device = InstanceDevice(Cuda(runtime, driver), 0, AttachedRegions(), StagingLimits(0, pool))
        self.announced: list[wire.DeviceArenaCreated] = []
        self.counted: list[int] = []
        self.device.on_pooled = self.counted.append
        self.arenas = DeviceArenas(self.device, self.announced.append)


@pytest.mark.parametrize(
    ("wanted", "allocated", "room", "found"),
    [
        (1, 0, 64 * MIB, 2 * MIB),
        (3 * MIB, 0, 64 * MIB, 4 * MIB),
        (1, 2 * MIB, 64 * MIB, 2 * MIB),
        (1, 14 * MIB, 64 * MIB, 8 * MIB),
        (1, 14 * MIB, 5 * MIB, 4 * MIB),
        (3 * MIB, 14 * MIB, 3 * MIB, None),
        (1, 0, MIB, None),
    ],
)
def test_arenas_double_what_there_is_within_the_limit(wanted: int, allocated: int, room: int, found: int) -> None:
    assert arena_byte_size(wanted, allocated, room) == found


def test_an_arena_is_announced_once_with_a_handle_that_other_processes_can_open() -> None:
    bench = Bench()
    places = [bench.arenas.take(8192) for _ in range(3)]
    assert all(place is not None and place[0].lease.region_number == -1 for place in places)
    (announced,) = bench.announced
    assert (announced.arena, announced.byte_size, announced.device_id) == (-1, 2 * MIB, 0)
    (address,) = (address for address in memory.own if memory.handle_of(address) == announced.handle)
    assert [place[1] - address for place in places if place is not None] == [0, 8192, 16384]
    assert bench.counted == [2 * MIB]


def test_a_freed_block_is_taken_again_and_a_larger_tensor_gets_another_arena() -> None:
    bench = Bench()
    first = bench.arenas.take(2 * MIB)
    assert first is not None
    second = bench.arenas.take(4 * MIB)
    assert second is not None
    assert second[0].lease.region_number == -2
    assert bench.arenas.take(4 * MIB) is None, "the pool has 8 MiB"
    bench.arenas.drop(second[0])
    assert bench.arenas.take(3 * MIB) is not None
    assert bench.counted == [2 * MIB, 6 * MIB]
    assert bench.arenas.block_count == 2


def test_gathered_inputs_and_arenas_share_the_pool() -> None:
    bench = Bench(pool=2 * MIB)
    assert bench.arenas.take(1) is not None
    assert bench.device.pool_room == 0
    bench = Bench(pool=2 * MIB)
    bench.device.pooled_byte_size = 65536
    assert bench.arenas.take(1) is None


def test_a_device_that_is_full_and_one_without_handles_leave_tensors_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    with monkeypatch.context() as context:
        context.setattr(runtime, "cudaMalloc", lambda size: (runtime.cudaError_t.cudaErrorMemoryAllocation, None))
        assert bench.arenas.take(1) is None
    assert "no 2097152 bytes on GPU 0 for tensors between models" in caplog.text
    with monkeypatch.context() as context:
        context.setattr(runtime, "cudaIpcGetMemHandle", lambda address: runtime.INVALID)
        assert bench.arenas.take(1) is None
    assert "tensors between models go through the host: GPU 0" in caplog.text
    assert bench.arenas.take(1) is None, "it is not tried again"
    assert (bench.announced, bench.device.pooled_byte_size) == ([], 0)


def test_a_tensor_that_is_left_is_a_copy_which_is_there_after_the_wait() -> None:
    bench = Bench()
    outputs = DeviceOutputs(bench.device, AttachedRegions(), waits_at_once=False, arenas=bench.arenas)
    array = bench.device.upload(VALUES, "FP32", VALUES.shape)
    left = outputs.leave("OUT", "FP32", array)
    assert left is not None
    assert left.span is not None
    assert outputs.pending
    address = next(iter(bench.arenas._arenas.values())).memory.address + left.span.offset
    assert bytes(at(address)) != VALUES.tobytes()
    outputs.wait()
    assert bytes(at(address)) == VALUES.tobytes()
    assert bench.device.copies == 1, "only the upload is between host and device"
    outputs.drop(left.span)
    assert bench.arenas.block_count == 0


@pytest.mark.parametrize("used", [True, False])
def test_an_output_is_computed_where_it_stays_and_what_was_not_used_is_freed(used: bool) -> None:
    bench = Bench()
    bench.device.arenas = bench.arenas
    outputs = DeviceOutputs(bench.device, AttachedRegions(), waits_at_once=False, arenas=bench.arenas)
    held = HeldInputs(lambda message: None, lambda: None)
    regions = AttachedRegions()
    writer = OutputWriter(regions, InputReader(regions, held), ArenaOutputs(lambda arena: None), held)
    writer.on_device = outputs
    asked = wire.RequestMessage(1, [], [RequestedOutput("OUT", on_device=True)])
    request = WorkerRequest(asked, [], None)  # type: ignore[arg-type]  # nobody responds
    bench.device.reserve(request, "OUT", "FP32", [1])
    place = bench.device.reserve(request, "OUT", "FP32", [4096])
    assert place is not None
    assert bench.arenas.block_count == 1, "a place that is reserved again takes the place of the former one"
    array = place.reshape(64, 64) if used else bench.device.upload(VALUES, "FP32", VALUES.shape)
    (tensor,) = writer.write(request, [OutputValue("OUT", "FP32", array)])
    assert tensor.span is not None
    assert (tensor.shape, outputs.pending) == ([64, 64] if used else [4096], True)
    address = next(iter(bench.arenas._arenas.values())).memory.address + tensor.span.offset
    assert (address == place.address) is used
    writer.free_reserved(request)
    assert bench.arenas.block_count == 1
    writer.free([tensor])
    assert bench.arenas.block_count == 0


def at(address: int) -> Any:
    return (ctypes.c_char * VALUES.nbytes).from_address(address)


# ---- what is read of other workers -----------------------------------------------------------------


class Reader:
    """A worker with an attached region, which is its own arena: the fake opens no handle of its own process."""

    def __init__(self) -> None:
        self.device = InstanceDevice(Cuda(runtime, driver), 0, AttachedRegions())
        self.sent: list[wire.ToKernel] = []
        #: What the readers of the memory had read when each message was sent.
        self.target = bytearray(VALUES.nbytes)
        self.seen: list[bytes] = []
        self.held = HeldInputs(self.send, lambda: None)
        self.inputs = DeviceInputs(self.device, self.held)
        block = DeviceBlock(self.device.cuda, 1 << 16, 0)
        ctypes.memmove(block.address, VALUES.ctypes.data, VALUES.nbytes)
        self.region = OwnDeviceRegion(block, CopyBuffers())
        self.block = block

    def send(self, message: wire.ToKernel) -> None:
        self.sent.append(message)
        self.seen.append(bytes(self.target))

    def tensor(self) -> tuple[Tensor, Span]:
        span = Span(RegionNumber(7), 0, VALUES.nbytes)
        return Tensor("IN", "FP32", [4096], None, span), span

    def read_on(self, array: DeviceArray, stream: Any, number: int) -> None:
        """Let a library read the array on a stream that DLPack calls `number`, and forget it."""
        capsule = to_capsule(array, self.device, number)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.target))
        runtime.cudaMemcpyAsync(address, array.address, VALUES.nbytes, None, stream)
        del capsule


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.block.free()  # a thread of the held inputs refers to all of it


@pytest.mark.parametrize("default", [True, False], ids=["the default stream", "another stream"])
def test_a_result_is_released_when_what_libraries_have_enqueued_has_read_it(reader: Reader, default: bool) -> None:
    stream = runtime.cudaStream_t(1) if default else runtime.cudaStreamCreate()[1]
    tensor, span = reader.tensor()
    result = reader.inputs.of_result(tensor, span, reader.region, 5)
    reader.read_on(result.array, stream, 1 if default else int(stream))
    reader.held.report_freed()
    assert reader.sent == []
    assert bytes(reader.target) == bytes(VALUES.nbytes), "the stream has done nothing yet"
    del result
    reader.held.report_freed()
    assert reader.sent == [wire.Released([5])]
    assert reader.seen == [VALUES.tobytes()]


def test_an_input_that_is_dropped_within_its_request_is_not_held(reader: Reader) -> None:
    tensor, span = reader.tensor()
    found = reader.inputs.of_request(tensor, span, reader.region, 3)
    del found
    assert reader.held.ended([3]) == []
    assert reader.sent == []


def test_an_input_that_is_still_used_is_held_until_it_is_dropped(reader: Reader) -> None:
    tensor, span = reader.tensor()
    found = reader.inputs.of_request(tensor, span, reader.region, 3)
    part = found.array[1:2]
    del found
    assert reader.held.ended([3]) == [3]
    reader.held.report_freed()
    assert reader.sent == [wire.InputsHeld([3])]
    del part
    reader.held.report_freed()
    assert reader.sent == [wire.InputsHeld([3]), wire.InputsFreed([3])]


def test_an_input_is_kept_by_what_is_enqueued_until_it_is_done(reader: Reader) -> None:
    tensor, span = reader.tensor()
    found = reader.inputs.of_request(tensor, span, reader.region, 3)
    reader.device.keep(found.array)
    del found
    assert reader.held.ended([3]) == [3]
    reader.device.synchronize()
    reader.held.report_freed()
    assert reader.sent == [wire.InputsHeld([3]), wire.InputsFreed([3])]


def test_strings_and_misaligned_elements_are_read_on_the_host(reader: Reader) -> None:
    for tensor in (
        Tensor("IN", "BYTES", [1], None, Span(RegionNumber(7), 0, 8)),
        Tensor("IN", "FP32", [1], None, Span(RegionNumber(7), 2, 4)),
    ):
        assert tensor.span is not None
        assert reader.inputs.of_request(tensor, tensor.span, reader.region, 3) is None


def test_memory_of_another_worker_that_cannot_be_opened_says_how_to_do_without(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "cuda", lambda: reader.device.cuda)
    region = DeviceRegion(bytes(64), 1 << 16, 0, CopyBuffers(), of_worker=True)
    tensor, span = reader.tensor()
    text = r"memory of another worker on GPU 0 cannot be opened \(with --cuda-memory-pool-byte-size=0:0 tensors go"
    with pytest.raises(InvalidArgument, match=text):
        reader.inputs.of_result(tensor, span, region, 5)
    reader.held.report_freed()
    assert reader.sent == [wire.Released([5])]


# ---- several workers in one process ---------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[None]:
    """The arenas of a process of several workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "SHARED_ARENAS", SharedArenas())
        yield


def sharing(bench: Bench) -> Bench:
    bench.arenas = DeviceArenas(bench.device, bench.announced.append, shares=True)
    return bench


@pytest.mark.usefixtures("shared")
def test_a_worker_reads_what_another_one_of_its_process_has_left_without_opening_a_handle() -> None:
    producer = sharing(Bench())
    place = producer.arenas.take(VALUES.nbytes)
    assert place is not None
    span, address = place
    ctypes.memmove(address, VALUES.ctypes.data, VALUES.nbytes)
    (created,) = producer.announced
    region = DeviceRegion(created.handle, created.byte_size, 0, CopyBuffers(), of_worker=True)
    opened = region.device_memory()
    assert opened.address + span.offset == address
    region.close()
    del opened


@pytest.mark.usefixtures("shared")
def test_a_worker_gets_the_arena_of_one_that_has_ended_and_no_memory_is_freed() -> None:
    first, second = sharing(Bench()), sharing(Bench())
    assert first.arenas.take(16) is not None
    allocated = set(memory.own)
    (created,) = first.announced
    first.arenas.close()
    del first
    gc.collect()
    assert set(memory.own) == allocated, "others may have it open"
    assert second.arenas.take(16) is not None
    assert second.announced == [created]
    assert set(memory.own) == allocated
    assert second.device.pooled_byte_size == created.byte_size


@pytest.mark.usefixtures("shared")
def test_an_arena_that_was_left_is_not_taken_where_it_is_too_small_or_not_allowed() -> None:
    first, small = sharing(Bench()), sharing(Bench(pool=2 * MIB))
    assert first.arenas.take(3 * MIB) is not None
    first.arenas.close()
    assert small.arenas.take(16) is not None
    assert small.announced[0].byte_size == 2 * MIB
    other = sharing(Bench(pool=16 * MIB))
    assert other.arenas.take(5 * MIB) is not None
    assert other.announced[0].byte_size == 8 * MIB
