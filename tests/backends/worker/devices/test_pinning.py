"""Shared memory that is pinned for copies, on the fake, whose streams do nothing before they are waited for."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from backends.reshape import TensorShapes
from backends.transport import wire
from backends.worker.devices.device_tensors import DeviceOutputs
from backends.worker.devices.instance_device import DeviceBlock, InstanceDevice
from backends.worker.devices.pinning import MIN_BYTE_SIZE, HostPinning
from backends.worker.devices.pinning_policy import MIN_REGION_BYTE_SIZE, MIN_USES
from backends.worker.devices.staging import StagingLimits
from backends.worker.held_inputs import HeldInputs
from backends.worker.inputs import InputReader
from backends.worker.memory import AttachedRegion, AttachedRegions, CopyBuffers, UnmappedRegion
from backends.worker.output_memory import ArenaOutputs
from backends.worker.outputs import OutputWriter
from backends.worker.request import OutputValue, WorkerRequest
from kernel.errors import InternalError
from shm.arena import pinned_window
from shm.arrays import address_of
from shm.cuda import Cuda
from shm.tensor import RequestedOutput, Tensor
from tests.fake_cuda import driver, runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPECS = {"IN": TensorShapes("IN", "UINT8", (-1,), batched=True)}
LIMIT = 16 << 20
REGION = 2 << 20
WINDOW = pinned_window(LIMIT)


class Bench:
    """An instance on the fake GPU, with its regions and its output arena."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.regions = AttachedRegions()
        self.device = InstanceDevice(Cuda(runtime, driver), 0, self.regions, StagingLimits(limit, 1 << 23))
        self.blocks: list[DeviceBlock] = []
        allocate = self.device.allocate
        self.device.allocate = lambda byte_size: self.blocks.append(allocate(byte_size)) or self.blocks[-1]  # type: ignore[method-assign, func-returns-value]
        self.outputs = ArenaOutputs(lambda arena: None)
        self.outputs.byte_size = 1 << 26
        self.pinning = self.device.pinning = HostPinning(self.device, self.regions, self.outputs)

    def client(self, number: int, byte_size: int = REGION, data: bytes = b"") -> AttachedRegion:
        """Attach a region of a client."""
        return self._attached(number, byte_size, data, volatile=True)

    def arena(self, number: int, byte_size: int, steady: int) -> AttachedRegion:
        """Attach an arena of the kernel."""
        region = self._attached(number, byte_size, b"", volatile=False)
        region.steady_byte_size = steady
        return region

    def _attached(self, number: int, byte_size: int, data: bytes, *, volatile: bool) -> AttachedRegion:
        fd = os.memfd_create("test")
        os.truncate(fd, byte_size)
        os.pwrite(fd, data, 0)
        region = AttachedRegion(fd, byte_size, 0, writable=True, volatile=volatile)
        self.regions.attach(number, region)
        return region

    def gather(self, region: AttachedRegion, offset: int = 0, byte_size: int = REGION) -> Any:
        """Copy bytes of a region to the device, as the input of a request; the stream is not waited for."""
        given = Tensor("IN", "UINT8", [1, byte_size], region.view(offset, byte_size))
        message = wire.RequestMessage(1, [])
        return self.device.gather([WorkerRequest(message, [given], None)], SPECS)["IN"]  # type: ignore[arg-type]

    def use(self, region: AttachedRegion, times: int = MIN_USES) -> None:
        for _ in range(times):
            self.gather(region)
            self.device.synchronize()

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait for the thread that pins."""
        until = time.monotonic() + 30
        while not done():
            assert time.monotonic() < until, "it has not happened"
            time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[Bench]:
    runtime.forget_work()
    runtime.registered.clear()
    runtime.pinned.clear()
    found = Bench()
    yield found
    found.device.close()
    assert runtime.registered == {}
    found.regions.close()
    found.outputs.close()
    for block in found.blocks:  # now: tests may refer to the instance for long
        block.free()


def test_a_region_that_is_used_often_is_pinned_and_copied_from_where_it_is(bench: Bench) -> None:
    region = bench.client(1, data=b"early")
    bench.use(region)
    bench.wait(lambda: bench.pinning.pins == 1)
    assert list(runtime.registered.values()) == [REGION]
    staged = len(runtime.pinned)
    found = bench.gather(region)
    region.view(0, 5)[:] = b"later"  # the copy is not made yet: it is one from the region itself
    bench.device.synchronize()
    assert ctypes.string_at(found.address, 5) == b"later"
    assert len(runtime.pinned) == staged


def test_a_region_that_begins_within_a_page_is_pinned_with_the_whole_page(bench: Bench) -> None:
    fd = os.memfd_create("test")
    os.truncate(fd, REGION + 100)
    region = AttachedRegion(fd, REGION, 100, writable=True, volatile=True)
    bench.regions.attach(1, region)
    bench.use(region)
    bench.wait(lambda: bench.pinning.pins == 1)
    [(start, byte_size)] = runtime.registered.items()
    assert start % mmap.PAGESIZE == 0
    assert byte_size == REGION + mmap.PAGESIZE
    assert bench.pinning.used(address_of(region.view(REGION - MIN_BYTE_SIZE, MIN_BYTE_SIZE)), MIN_BYTE_SIZE)


def test_a_request_never_waits_for_pinning(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, bool]] = []
    monkeypatch.setattr(bench.pinning, "_begin", lambda mapping, pin: begun.append((mapping.number, pin)))
    region = bench.client(1)
    bench.use(region, 2 * MIN_USES)
    assert begun == [(1, True)]
    assert runtime.registered == {}


def test_small_regions_and_small_copies_stay_as_they_are(bench: Bench) -> None:
    small = bench.client(1, MIN_REGION_BYTE_SIZE - 4096)
    large = bench.client(2)
    for _ in range(3 * MIN_USES):
        bench.gather(small, 0, MIN_REGION_BYTE_SIZE - 4096)
        bench.gather(large, 0, MIN_BYTE_SIZE - 1)
        bench.device.synchronize()
    assert not bench.pinning.used(address_of(memoryview(bytearray(MIN_BYTE_SIZE))), MIN_BYTE_SIZE)
    assert bench.pinning.thread is None


def test_a_region_is_unpinned_after_its_copies_when_it_is_unregistered(bench: Bench) -> None:
    region = bench.client(1)
    bench.use(region)
    bench.wait(lambda: bench.pinning.pins == 1)
    used = bench.device.pinned_budget.used_byte_size
    bench.gather(region)  # which is still to be done, from pinned memory
    bench.regions.detach(1)
    bench.wait(lambda: bench.pinning.unpins == 1)
    assert runtime.registered == {}
    assert bench.device.pinned_budget.used_byte_size == used - REGION


def test_the_memory_of_a_region_stays_mapped_until_it_is_unpinned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = bench.client(1)
    bench.use(region)
    bench.wait(lambda: bench.pinning.pins == 1)
    mapping = region._mapping
    assert mapping is not None
    begun: list[Any] = []
    monkeypatch.setattr(bench.pinning, "_begin", lambda mapping, pin: begun.append((mapping, pin)))
    bench.regions.detach(1)
    [(unpinned, pin)] = begun
    assert not pin
    assert not mapping.closed
    bench.pinning._unpin_now(unpinned)
    gc.collect()
    mapping.close()
    assert runtime.registered == {}


def test_a_region_whose_owner_has_shortened_another_one_is_unpinned_before_it_is_copied(bench: Bench) -> None:
    region = bench.client(1)
    bench.use(region)
    bench.wait(lambda: bench.pinning.pins == 1)
    bench.regions.attach(1, UnmappedRegion(os.memfd_create("test"), REGION, 0, CopyBuffers()))
    bench.wait(lambda: bench.pinning.unpins == 1)
    assert runtime.registered == {}


def test_only_the_steady_pages_of_an_arena_are_pinned_with_their_first_use(bench: Bench) -> None:
    arena = bench.arena(1, 8 << 20, WINDOW)
    bench.gather(arena, WINDOW, WINDOW)
    assert bench.pinning.thread is None, "its pages may be given back"
    bench.gather(arena, 4096, MIN_BYTE_SIZE)
    bench.wait(lambda: bench.pinning.pins == 1)
    assert list(runtime.registered.values()) == [WINDOW]


def test_a_tensor_over_the_end_of_the_pinned_bytes_is_copied_in_two_pieces(bench: Bench) -> None:
    steady = 1 << 20
    region = bench.arena(1, 4 << 20, steady)
    bench.gather(region, 0, steady)
    bench.device.synchronize()
    bench.wait(lambda: bench.pinning.pins == 1)
    data = np.random.default_rng(1).bytes(REGION)
    for offset in (0, steady - 1000, steady, steady + 1000):
        region.view(offset, REGION)[:] = data
        copies = bench.device.copies
        found = bench.device.upload(region.view(offset, REGION), "UINT8", [REGION])
        bench.device.synchronize()
        assert ctypes.string_at(found.address, REGION) == data
        assert bench.device.copies == copies + 1
    region.view(steady - 8, 16)[:] = bytes(16)
    bench.device.copy_to(found, region.view(steady - 8, REGION))
    bench.device.synchronize()
    assert bytes(region.view(steady - 8, REGION)) == data


def test_a_copy_that_ends_in_pinned_bytes_begins_before_them_in_a_piece_of_its_own(bench: Bench) -> None:
    region = bench.client(1)
    bench.use(region)
    bench.wait(lambda: bench.pinning.pins == 1)
    start = address_of(region.view(0, 1))
    assert bench.pinning.reach(start - 10, 30) == 10
    assert bench.pinning.reach(start - 10, 5) == 5
    assert bench.pinning.reach(start + REGION - 3, 30) == 3
    assert bench.pinning.reach(start + REGION, 30) == 30


def test_the_pages_of_the_own_arena_stay_where_it_is_pinned(bench: Bench) -> None:
    array = bench.device.upload(np.full(WINDOW, 7, np.uint8), "UINT8", [WINDOW])
    span, view = bench.outputs.take(WINDOW)
    bench.device.copy_to(array, view)
    bench.device.synchronize()
    bench.wait(lambda: bench.pinning.pins == 1)
    assert list(runtime.registered.values()) == [WINDOW]
    arena = bench.outputs.arena
    assert arena is not None
    assert (span.offset, bytes(view)) == (0, b"\7" * WINDOW)
    pages = os.fstat(arena.region.fd).st_blocks * 512
    arena.allocator._cache_limit = 0  # pages are given back at once
    view.release()
    bench.outputs.free([span.offset])
    assert os.fstat(arena.region.fd).st_blocks * 512 == pages == WINDOW
    arena.allocator.check()


def test_a_region_that_nobody_uses_is_unpinned_for_another_one(bench: Bench) -> None:
    bench.device.pinned_budget.limit_byte_size = 2 * REGION  # of which the block for batches has one
    first, second = bench.client(1), bench.client(2)
    bench.use(first)
    bench.wait(lambda: bench.pinning.pins == 1)
    bench.use(second, 6 * MIN_USES)
    bench.wait(lambda: (bench.pinning.pins, bench.pinning.unpins) == (2, 1))
    assert bench.device.pinned_budget.used_byte_size == 2 * REGION
    assert len(runtime.registered) == 1


def test_a_larger_batch_gets_the_pinned_memory_of_regions(bench: Bench) -> None:
    region = bench.client(1)
    bench.use(region)
    bench.wait(lambda: bench.pinning.pins == 1)
    bench.device.pinned_budget.limit_byte_size = bench.device.pinned_budget.used_byte_size
    own = memoryview(bytearray(2 * REGION))
    given = Tensor("IN", "UINT8", [1, len(own)], own)
    request = WorkerRequest(wire.RequestMessage(1, []), [given], None)  # type: ignore[arg-type]  # nobody responds
    for _ in range(2):
        bench.device.gather([request], SPECS)
        bench.device.synchronize()
        bench.wait(lambda: bench.pinning.unpins == 1)
    assert [len(block) for block in runtime.pinned.values()] == [2 * REGION]


def test_memory_that_the_device_still_writes_to_is_not_given_to_another_output(bench: Bench) -> None:
    held = HeldInputs(lambda message: None, lambda: None)
    writer = OutputWriter(bench.regions, InputReader(bench.regions, held), bench.outputs, held)
    writer.on_device = DeviceOutputs(bench.device, bench.regions, waits_at_once=False)
    array = bench.device.upload(np.full(MIN_BYTE_SIZE, 7, np.uint8), "UINT8", [MIN_BYTE_SIZE])
    small: Any = SimpleNamespace(lease=SimpleNamespace(region_number=5), offset=0, byte_size=1)
    wanted = [RequestedOutput("X"), RequestedOutput("Y", span=small)]
    request = WorkerRequest(wire.RequestMessage(1, [], wanted), [], None)  # type: ignore[arg-type]  # nobody responds
    with pytest.raises(InternalError, match="should be at least"):
        writer.write(request, [OutputValue("X", "UINT8", array), OutputValue("Y", "UINT8", array)])
    assert not bench.device.pending
    _, view = bench.outputs.take(MIN_BYTE_SIZE)  # the block of X
    view[:] = bytes(MIN_BYTE_SIZE)
    bench.device.synchronize()
    assert bytes(view) == bytes(MIN_BYTE_SIZE)
    view.release()


def test_what_cannot_be_pinned_is_logged_once_and_copied_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PINS_NOTHING", "1")
    first, second = bench.client(1, data=b"bytes"), bench.client(2)
    with caplog.at_level(logging.WARNING):
        bench.use(first)
        bench.wait(lambda: bench.pinning._policy.stopped)
        bench.use(first, 3 * MIN_USES)
        bench.use(second, 3 * MIN_USES)
    assert [record.message for record in caplog.records] == [
        f"{REGION} bytes of shared memory cannot be pinned, and are copied without: "
        "cudaHostRegister failed: cudaErrorNotSupported (801)"
    ]
    assert bench.pinning.pins == 0
    assert bench.device.pinned_budget.used_byte_size == sum(len(block) for block in runtime.pinned.values())
    bench.regions.detach(1)


def test_one_region_that_cannot_be_pinned_is_left_alone_and_others_are_pinned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = runtime.cudaHostRegister, list[int]()

    def register(address: int, byte_size: int, flags: int) -> Any:
        if not refused:
            refused.append(address)
            return (runtime.cudaError_t.cudaErrorInvalidValue,)
        return real(address, byte_size, flags)

    monkeypatch.setattr(runtime, "cudaHostRegister", register)
    first, second = bench.client(1), bench.client(2)
    bench.use(first)
    bench.wait(lambda: bool(refused))
    bench.use(second)
    bench.wait(lambda: bench.pinning.pins == 1)
    bench.use(first, 2 * MIN_USES)
    assert len(runtime.registered) == 1


def test_a_window_is_an_eighth_and_of_whole_pages() -> None:
    assert pinned_window(64 << 20) == 8 << 20
    assert pinned_window(100 << 20) == 8 << 20
    assert pinned_window(8 * mmap.PAGESIZE) == mmap.PAGESIZE
    assert pinned_window(8 * mmap.PAGESIZE - 1) == 0
    assert pinned_window(0) == 0
