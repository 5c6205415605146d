"""Instances on a GPU in one process: each executes when it has a batch, and frees what it has when it leaves."""

from __future__ import annotations

import gc
import os
import queue
import socket
import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
import pytest

from backends.transport import wire
from backends.transport.channel import BlockingChannel
from backends.worker.loop import Worker
from backends.worker.request import OutputValue
from backends.worker.shared.members import Members
from shm.cuda import BINDINGS_VARIABLE, cuda
from tests.backends.worker.threaded_worker import LOAD, Scripted, request
from tests.fake_cuda import memory, runtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Timings
    from backends.worker.request import WorkerRequest
    from backends.worker.shared.turn import Turn

WAIT_S = 20


class Free(Scripted):
    """Executes when all of its kind do."""

    overlaps_on_device = True
    shares_worker = shares_worker_on_gpu = True
    together: ClassVar[threading.Barrier]
    devices: ClassVar[queue.SimpleQueue[int]]

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        device = self.host.device
        assert device is not None
        array = device.gather(requests, {})["IN"]
        device.computes()
        self.together.wait(WAIT_S)
        self.devices.put(runtime.cudaGetDevice()[1])
        requests[0].respond([OutputValue("OUT", "FP32", array)])


class OnlyOnCpu(Scripted):
    shares_worker = True


class Process:
    """A process of several instances, and the kernel's ends of their connections."""

    def __init__(self) -> None:
        self.ended: queue.SimpleQueue[wire.ToKernel] = queue.SimpleQueue()
        self.members = Members(self.ended.put, self._worker)
        self.channels: list[BlockingChannel] = []
        self._received: dict[BlockingChannel, deque[wire.ToKernel]] = defaultdict(deque)

    def _worker(self, channel: BlockingChannel, turn: Turn) -> Worker:
        return Worker(channel, turn=turn)

    def add(self, device_id: int) -> tuple[BlockingChannel, wire.ToKernel]:
        """Load another instance; returns its connection, and what it says to the load."""
        ours, theirs = socket.socketpair()
        channel = BlockingChannel(ours)
        self.channels.append(channel)
        self.members.add(wire.AddMember(len(self.channels), f"m_{len(self.channels)}"), theirs.detach)
        assert isinstance(self.next(channel), wire.Hello)
        assert isinstance(self.next(channel), wire.OutboxCreated)
        os.close(channel.take_fd())
        load = msgspec.structs.replace(
            LOAD, kind="GPU", device_id=device_id, pinned_byte_size=1 << 20, device_pool_byte_size=1 << 20
        )
        channel.send(load)
        return channel, self.next(channel)

    def next(self, channel: BlockingChannel) -> wire.ToKernel:
        received = self._received[channel]
        if not received:
            raw = channel.receive()
            assert raw is not None
            received += map(wire.to_kernel_decoder.decode, raw)
        return received.popleft()

    def close(self) -> None:
        for channel in self.channels:
            channel.send(wire.Stop())
            self.ended.get(timeout=WAIT_S)
            channel.close()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setenv(BINDINGS_VARIABLE, "tests.fake_cuda")
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    runtime.forget_work()
    cuda.cache_clear()
    monkeypatch.setattr("backends.worker.loop.backend_class", lambda name, arguments: Free)
    yield Process()
    cuda.cache_clear()


def test_four_instances_execute_at_once_each_on_its_device(process: Process) -> None:
    Free.together, Free.devices = threading.Barrier(4), queue.SimpleQueue()
    channels = []
    for number in range(4):
        channel, loaded = process.add(number % 2)
        assert isinstance(loaded, wire.Loaded), loaded
        assert loaded.overlaps
        channels.append(channel)
    for number, channel in enumerate(channels):
        channel.send(wire.Execute(1, [request(1, np.full(2, number, np.float32).tobytes())]))
    for number, channel in enumerate(channels):
        executed = process.next(channel)
        assert isinstance(executed, wire.Executed)
        assert executed.responses[0].outputs[0].as_numpy().tolist() == [number] * 2
    assert sorted(Free.devices.get(timeout=WAIT_S) for _ in range(4)) == [0, 0, 1, 1]
    process.close()


def test_an_instance_that_leaves_frees_its_streams_and_pinned_memory(process: Process) -> None:
    Free.together, Free.devices = threading.Barrier(1), queue.SimpleQueue()
    gc.collect()
    before, own = set(runtime.pinned), set(memory.own)
    runtime.destroyed.clear()
    channel, _ = process.add(0)
    channel.send(wire.Execute(1, [request(1)]))
    assert isinstance(process.next(channel), wire.Executed)
    assert set(runtime.pinned) > before
    process.close()
    gc.collect()
    assert set(runtime.pinned) == before
    assert set(memory.own) == own
    assert sorted(type(each).__name__ for each in runtime.destroyed) == ["Event", "Stream"]


def test_a_backend_that_must_execute_in_turn_is_refused_on_a_gpu(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.worker.loop.backend_class", lambda name, arguments: OnlyOnCpu)
    _, refused = process.add(0)
    assert refused == wire.LoadFailed(
        "unsupported",
        "model 'm' cannot share a worker on GPUs (parameter naiad.worker): its backend 'scripted' does not support it",
    )
    process.close()
