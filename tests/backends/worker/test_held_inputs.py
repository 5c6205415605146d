"""Inputs that a model keeps are left alone until it lets them go."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

import numpy as np

from backends.transport import wire
from backends.worker.held_inputs import HeldInputs, LateRelease
from backends.worker.memory import CopiedRegion
from tests.backends.worker.regions import attached_region

if TYPE_CHECKING:
    from shm.tensor import Buffer


class RecordingRegion:
    """A region that notes which of its inputs have ended."""

    steady = shared = in_place = True

    def __init__(self, *, volatile: bool = False) -> None:
        self.number = 7
        self.volatile = volatile
        self.private = False
        self.steady = self.shared = not volatile
        self.ended_inputs: list[tuple[int, int]] = []
        self._memory = mmap.mmap(-1, 1 << 12)

    def view(self, offset: int, byte_size: int) -> memoryview:
        return memoryview(self._memory)[offset : offset + byte_size]

    input_view = view

    def seen_by_all(self, address: int, byte_size: int) -> bool:
        return self.shared

    def write(self, offset: int, data: Buffer) -> None:
        self.view(offset, len(data))[:] = data

    def ended(self, offset: int, byte_size: int) -> None:
        self.ended_inputs.append((offset, byte_size))

    def close(self) -> None:
        """Nothing is mapped."""


class Bench:
    """Inputs of 64 bytes in an arena, the n-th of them at 64 n, and in a region of a client."""

    def __init__(self) -> None:
        self.sent: list[wire.ToKernel] = []
        self.volatile_held = 0
        self.held = HeldInputs(self.sent.append, self._volatile_held)
        self.arena = RecordingRegion()
        self.region_of_client = RecordingRegion(volatile=True)
        self._count = 0

    def _volatile_held(self) -> None:
        self.volatile_held += 1

    def array(self, number: int, *, volatile: bool = False) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        region = self.region_of_client if volatile else self.arena
        data = self.held.watch(number, region, 64 * self._count, 64)
        self._count += 1
        return np.frombuffer(data, np.float32).reshape(4, 4)[1:].reshape(-1)


def test_nothing_is_said_of_inputs_that_were_used_and_dropped() -> None:
    bench = Bench()
    bench.array(1)
    bench.array(1, volatile=True)
    assert bench.held.watched
    assert bench.held.ended([1]) == []
    bench.held.report_freed()
    assert not bench.held.watched
    assert bench.sent == []
    assert bench.volatile_held == 0
    assert (bench.arena.ended_inputs, bench.region_of_client.ended_inputs) == ([(0, 64)], [(64, 64)])


def test_an_input_is_held_as_long_as_any_array_over_it_lives() -> None:
    bench = Bench()
    kept = bench.array(1)
    bench.array(2)
    assert bench.held.ended([1, 2]) == [1]
    assert bench.sent == [wire.InputsHeld([1])]
    assert bench.arena.ended_inputs == [(64, 64)]
    part = kept[2:].view(np.uint8)
    del kept
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1])]
    del part
    assert bench.arena.ended_inputs == [(64, 64)], "the collector may run in the middle of anything"
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1]), wire.InputsFreed([1])]
    assert bench.arena.ended_inputs == [(64, 64), (0, 64)]
    bench.held.report_freed()
    assert len(bench.sent) == 2


def test_a_request_is_free_when_the_last_of_its_inputs_is() -> None:
    bench = Bench()
    first, second = bench.array(1), bench.array(1)
    assert bench.held.ended([1]) == [1]
    del first
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1])]
    assert bench.arena.ended_inputs == []
    del second
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1]), wire.InputsFreed([1])]
    assert bench.arena.ended_inputs == [(0, 64), (64, 64)]


def test_a_request_without_a_response_is_not_judged() -> None:
    bench = Bench()
    bench.array(1)
    kept = bench.array(2)
    assert bench.held.ended([1]) == []
    assert bench.sent == []
    assert list(bench.held.watched) == [2]
    assert bench.arena.ended_inputs == [(0, 64)]
    del kept


def test_the_worker_hears_of_a_model_that_keeps_memory_of_a_client_once_for_each_response() -> None:
    bench = Bench()
    kept = bench.array(1, volatile=True)
    assert bench.held.ended([1]) == []
    assert bench.volatile_held == 1
    assert bench.sent == []
    bench.held.ended([1])
    assert bench.volatile_held == 1
    del kept


def test_a_model_that_responds_while_it_uses_its_inputs_does_not_keep_them() -> None:
    bench = Bench()
    used = bench.array(1, volatile=True)
    bench.held.ended([1], backend_returned=False)
    assert bench.volatile_held == 0
    del used


def test_copies_are_not_watched() -> None:
    bench = Bench()
    region = CopiedRegion(64)
    region.write(0, bytes(range(64)))
    kept = np.frombuffer(bench.held.watch(1, region, 16, 32), np.uint8)
    assert kept.tolist() == list(range(16, 48))
    assert bench.held.ended([1]) == []
    assert bench.sent == []


def test_an_input_ends_without_another_at_the_same_place() -> None:
    bench = Bench()
    region = attached_region(bytes(64), writable=False)
    first = np.frombuffer(bench.held.watch(1, region, 0, 64), np.uint8)
    first[0] = 9
    second = np.frombuffer(bench.held.watch(2, region, 0, 64), np.uint8)
    assert second[0] == 0
    del second
    assert bench.held.ended([2]) == []
    assert first[0] == 9, "its pages are still its own"
    assert bench.held.ended([1]) == [1]
    del first
    bench.held.report_freed()
    assert bench.sent == [wire.InputsHeld([1]), wire.InputsFreed([1])]
    region.close()


def test_what_is_dropped_while_nothing_happens_is_released() -> None:
    released = threading.Semaphore(0)
    late = LateRelease(released.release, delay_s=0)
    late.signal()
    assert not released.acquire(blocking=False), "the thread is not there yet"
    for _ in range(3):
        late.start()
        assert released.acquire(timeout=60)
        late.signal()
        late.signal()
    assert released.acquire(timeout=60)


def test_the_thread_ends_when_the_kernel_is_gone() -> None:
    def release() -> None:
        raise BrokenPipeError

    late = LateRelease(release, delay_s=0)
    late.start()
    late.signal()
    assert late.thread is not None
    late.thread.join(60)
    assert not late.thread.is_alive()
