"""A worker that the test plays: what it says to the kernel is said by the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, TypeVar

from backends.helper.process import Helper
from backends.launch.launcher import Pending, not_shown
from backends.launch.output import OutputLimits, WorkerOutput
from backends.supervision.handle import WorkerHandle
from backends.supervision.session import WorkerSession
from backends.transport import wire
from backends.transport.channel import BlockingChannel
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import ServerStopping
from kernel.loop.busy_poll import BusyPolling, LoopPoller
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.testing import FakeClock, RecordingSink, model_spec
from schedulers.direct import direct
from shm.arena import Arena
from shm.lease import RegionNumber
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

    from backends.launch.launcher import Announce


SomeBench = TypeVar("SomeBench", bound="Bench")


class FakeWorker:
    """The worker's end of a session, played by the test. Launcher and process in one."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.channel = BlockingChannel(theirs)
        self._theirs = theirs
        #: Where it finds folders of this machine, if elsewhere; what its launch waited for; what it was launched for.
        self.folders: dict[str, str] = {}
        self.waited_for: list[str] = []
        self.host, self.unreachable = "", False
        self.helps: list[bool] = []
        self.is_stopped = False
        self.died = False
        self.terminated = False
        self.stacks_written = 0
        #: Returns the mark of the process at each look.
        self.mark: Callable[[], Hashable] | None = None
        self._on_lost: Callable[[str], None] | None = None
        self.output = WorkerOutput("m_0", OutputLimits(), FakeClock())

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> FakeWorker:
        self.helps.append(helper)
        for text in self.waited_for:
            pending(text)
        return self

    def folder(self, path: str) -> str:
        return self.folders.get(path, path)

    async def connect(self, announce: Announce) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            announce(theirs.fileno())
        return ours

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._on_lost = callback

    @property
    def has_ended(self) -> bool:
        return self.died

    @property
    def stopped(self) -> bool:
        return self.is_stopped

    @property
    def work_mark(self) -> Hashable:
        return self.mark() if self.mark is not None else None

    def write_stacks(self) -> None:
        self.stacks_written += 1

    def terminate(self) -> None:
        self.terminated = True

    def kill(self) -> None:
        self.die("killed by signal 9 (SIGKILL)")

    def die(self, cause: str) -> None:
        self.died = True
        if self._on_lost is not None:
            callback, self._on_lost = self._on_lost, None
            self._theirs.close()
            with contextlib.suppress(IndexError):  # descriptors of regions that no test has taken
                while True:
                    os.close(self.channel.take_fd())
            callback(cause)

    async def stop(self, grace_s: float) -> None:
        self.die("exit code 0")

    def raw(self, data: bytes) -> None:
        self._theirs.sendall(data)


class Bench:
    """A session with a loaded model, and a worker that executes `concurrency` batches at the same time."""

    def __init__(self, *, concurrency: int = 1, decoupled: bool = False, checks_health: bool = False) -> None:
        self._checks_health = checks_health
        self._concurrency = concurrency
        self._decoupled = decoupled
        self.worker = FakeWorker()
        self.session = WorkerSession("m_0")
        self.lost: list[str] = []

    async def start(self) -> None:
        self.worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
        await self.session.start(self.worker)
        self.worker.channel.send(wire.Loaded(5, self._concurrency, self._checks_health))
        assert await self.session.load(wire.Load("{}", "", 1, "m_0")) == 5
        assert [type(message) for message in await self.received()] == [wire.Load]
        spec = model_spec("m", dims=(-1,), decoupled=self._decoupled)
        self.clock = FakeClock()
        self.model = Model(spec, ModelConfig(), 1, direct, self.clock)
        self.model.start()
        self.polling = BusyPolling(50_000, processor_count=2)
        self.handle = WorkerHandle(
            "m_0", self.session, self.model, LoopPoller(self.polling), Helper(self.worker, 1 << 20)
        )
        self.session.on_lost = self._lost
        self.model.instances.add(self.handle)

    def _lost(self, cause: str) -> None:
        self.lost.append(cause)
        self.handle.lost(cause)

    def submit(self) -> Request:
        request = Request("m", [Tensor("IN", "FP32", [1], bytes(4))], RecordingSink())
        self.model.submit(request)
        return request

    async def received(self) -> list[wire.ToWorker]:
        """Return what the worker has been sent since the last time, when the event loop has had its iterations."""
        await settle()
        return self.received_now()

    def received_now(self) -> list[wire.ToWorker]:
        """Return what the worker has been sent since the last time, before the event loop runs on."""
        messages: list[wire.ToWorker] = []
        while raw := self.worker.channel.receive(wait=False):
            messages += map(wire.to_worker_decoder.decode, raw)
        return messages

    async def say(self, *messages: wire.ToKernel) -> None:
        """Let the worker send messages, and the kernel handle them."""
        for message in messages:
            self.worker.channel.send(message)
        await settle()


def run(
    scenario: Callable[[Bench], Awaitable[None]],
    *,
    concurrency: int = 1,
    decoupled: bool = False,
    checks_health: bool = False,
) -> None:
    """Run a scenario, and check at its end that nothing is left."""
    run_on(Bench(concurrency=concurrency, decoupled=decoupled, checks_health=checks_health), scenario)


def run_on(bench: SomeBench, scenario: Callable[[SomeBench], Awaitable[None]]) -> None:
    """As `run`, with a bench that the test has made."""

    async def main() -> None:
        await bench.start()
        await scenario(bench)
        bench.model.check()
        bench.model.close(ServerStopping(""))
        bench.worker.kill()
        bench.model.check()
        await asyncio.sleep(0)
        assert bench.polling.in_flight == 0, "every request that was counted is over"
        assert bench.polling.busy_workers == 0, "and so is every worker with requests"
        assert bench.polling.slow_workers == 0, "also a slow one"
        if bench.model.input_arena is not None:
            assert bench.model.input_arena.region.closed, "every lease was released"

    asyncio.run(main())


async def settle() -> None:
    """Let both ends read what was sent, and act on it: what was written to a socket can be read at once."""
    for _ in range(10):
        await asyncio.sleep(0)


def responses(request: Request) -> list[str]:
    assert isinstance(request.sink, RecordingSink)
    return ["ok" if r.error is None else type(r.error).__name__ for r in request.sink.responses]


def request_with_large_input(bench: Bench) -> Request:
    """Submit a request whose input lies in the model's arena, all ones."""
    if bench.model.input_arena is None:
        bench.model.input_arena = Arena("inputs", 1 << 20)
    block = bench.model.input_arena.take(8192)
    assert block is not None
    block.view()[:] = b"\1" * 8192
    request = Request("m", [Tensor("IN", "UINT8", [8192], span=block.span)], RecordingSink(), leased=True)
    bench.model.submit(request)
    return request


def input_part(request: Request, name: str, offset: int, byte_size: int) -> Tensor:
    """Return a part of the request's large input, as a worker names it as an output."""
    span = request.inputs[0].span
    assert span is not None
    place = Span(RegionNumber(span.lease.region_number), span.offset + offset, byte_size)
    return Tensor(name, "UINT8", [abs(byte_size)], None, place)


def output_block(name: str, offset: int, byte_size: int) -> Tensor:
    """Return an output in the worker's own arena, as the worker names it."""
    return Tensor(name, "UINT8", [byte_size], None, Span(RegionNumber(wire.OUTPUT_ARENA), offset, byte_size))


def response(data: bytes = b"", name: str = "OUT") -> wire.ResponseMessage:
    """Return a response with one small output."""
    return wire.ResponseMessage([Tensor(name, "UINT8", [len(data)], data)])
