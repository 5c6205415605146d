"""Models come to a process and leave it, each on a connection of its own.

Processes of several models in the process of the tests.

Models of a process execute one at a time, in the order in which they ask.

Instances on a GPU in one process: each executes when it has a batch, and frees what it has when it leaves.
"""

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
from backends.worker.members import Members, Turn
from backends.worker.request import OutputValue
from shm.cuda import BINDINGS_VARIABLE, cuda
from tests.backends.worker.threaded_worker import LOAD, Scripted, request
from tests.fake_cuda import memory, runtime

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Timings
    from backends.worker.request import WorkerRequest

JOIN_S = 60


@pytest.fixture(autouse=True)
def members_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait for the threads of members, which collect garbage after they have said that they end.

    What is frozen stays so: it is that of the process of the tests, and a collection that walks through all of it holds
    the interpreter's lock for seconds, so that no test goes on and no time limit is looked at.
    """
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(JOIN_S)
        assert not thread.is_alive(), f"the thread '{thread.name}' goes on after its test"


class BrokenMember:
    """A model whose worker fails."""

    closed = False

    def run(self) -> None:
        raise KeyError(7)

    def close(self) -> None:
        self.closed = True

    def enter_turn(self) -> None: ...

    def leave_turn(self) -> None: ...


def connection() -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair()
    return ours, theirs.detach()


def test_a_worker_that_fails_is_told_to_the_kernel(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[wire.ToKernel] = []
    ended, member = threading.Event(), BrokenMember()

    def send(message: wire.ToKernel) -> None:
        sent.append(message)
        ended.set()

    ours, fd = connection()
    with ours:
        Members(send, lambda channel, turn: member).add(wire.AddMember(5, "a"), lambda: fd)
        assert ended.wait(60)
    assert sent == [wire.MemberEnded(5, "KeyError: 7")]
    assert member.closed
    assert "the worker of a model failed" in caplog.text


def test_a_backend_that_cannot_share_a_worker_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.builtin.identity.IdentityBackend.shares_worker", False)
    ended = threading.Event()

    def new_member(channel: BlockingChannel, turn: Turn) -> Worker:
        return Worker(channel, local=False, turn=turn)

    ours, fd = connection()
    with ours:
        Members(lambda message: ended.set(), new_member).add(wire.AddMember(1, "m"), lambda: fd)
        channel = BlockingChannel(ours.dup())
        channel.send(wire.Complete('{"name": "m", "backend": "identity"}', "/m", 1))
        found: list[wire.ToKernel] = []
        while len(found) < 2:
            found += [wire.to_kernel_decoder.decode(raw) for raw in channel.receive() or ()]
        channel.send(wire.Stop())
        assert ended.wait(60)
        channel.close()
    assert isinstance(found[0], wire.Hello)
    assert found[1] == wire.LoadFailed(
        "unsupported",
        "model 'm' cannot share a worker (parameter naiad.worker): its backend 'identity' does not support it",
    )


def test_a_process_on_another_host_opens_the_connection_of_a_model_and_sends_its_token() -> None:
    ended = threading.Event()

    def new_member(channel: BlockingChannel, turn: Turn) -> Worker:
        return Worker(channel, local=False, turn=turn)

    def no_descriptor() -> int:
        raise AssertionError("nobody passes descriptors between hosts")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        message = wire.AddMember(3, "m", address, b"t" * 16)
        Members(lambda message: ended.set(), new_member).add(message, no_descriptor)
        listener.settimeout(30)
        sock, _ = listener.accept()
    sock.settimeout(30)
    assert sock.recv(16, socket.MSG_WAITALL) == b"t" * 16
    channel = BlockingChannel(sock)
    [raw] = channel.receive() or [b""]
    hello = wire.to_kernel_decoder.decode(raw)
    assert isinstance(hello, wire.Hello)
    assert not hello.local
    channel.send(wire.Stop())
    assert ended.wait(60)
    channel.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
def test_a_connection_that_cannot_be_opened_is_told_to_the_kernel(address: str) -> None:
    sent: queue.SimpleQueue[wire.ToKernel] = queue.SimpleQueue()

    def new_member(channel: BlockingChannel, turn: Turn) -> Worker:
        raise AssertionError("there is no connection")

    Members(sent.put, new_member).add(wire.AddMember(3, "m", address), lambda: -1)
    ended = sent.get(timeout=60)
    assert isinstance(ended, wire.MemberEnded)
    assert ended.member == 3
    assert ended.failure.startswith(f"it cannot connect to {address}: ")


class Model:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self._log = log

    def enter_turn(self) -> None:
        self._log.append(f"{self.name} in")

    def leave_turn(self) -> None:
        self._log.append(f"{self.name} out")


def test_a_model_that_goes_on_costs_no_change() -> None:
    turn, log = Turn(), list[str]()
    a, b = Model("a", log), Model("b", log)
    for model in (a, a, b, a):
        with turn.of(model):
            pass
    assert log == ["a in", "a out", "b in", "b out", "a in"]


def test_the_turn_goes_to_those_who_wait_in_their_order() -> None:
    turn, order = Turn(), list[str]()
    waiting: list[threading.Thread] = []
    models = [Model(name, []) for name in "abc"]

    def take(model: Model) -> None:
        with turn.of(model):
            order.append(model.name)

    with turn.of(Model("first", [])):
        for number, model in enumerate(models, 1):
            thread = threading.Thread(target=take, args=(model,))
            thread.start()
            waiting.append(thread)
            while len(turn._waiting) < number:  # one after the other
                pass
    for thread in waiting:
        thread.join(60)
    assert order == list("abc")


def test_a_model_whose_turn_fails_gives_it_on() -> None:
    turn, log = Turn(), list[str]()
    with pytest.raises(KeyError), turn.of(Model("a", log)):
        raise KeyError
    with turn.of(Model("b", log)):
        assert log == ["a in", "a out", "b in"]


def test_a_model_that_has_ended_takes_away_what_it_has_changed_once() -> None:
    turn, log = Turn(), list[str]()
    a, b = Model("a", log), Model("b", log)
    with turn.of(a):
        pass
    turn.forget(a)
    turn.forget(b)
    with turn.of(b):
        assert log == ["a in", "a out", "b in"]


WAIT_S = 60


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
