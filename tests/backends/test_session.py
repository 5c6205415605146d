"""A worker that misbehaves is dropped: what it sends is never trusted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from backends import wire
from backends.channel import BlockingChannel
from backends.framing import frame
from backends.handle import WorkerHandle
from backends.session import WorkerSession
from kernel.busy_poll import BusyPolling, LoopPoller
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import InternalError, ServerStopping, WorkerLost
from kernel.model import Model
from kernel.request import InputTensor, Request
from kernel.testing import FakeClock, RecordingSink, model_spec
from schedulers.direct import direct
from shm.arena import Arena
from shm.region import Span

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class FakeWorker:
    """The worker's end of a session, played by the test. Launcher and process in one."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.channel = BlockingChannel(theirs)
        self._theirs = theirs
        self._on_lost: Callable[[str], None] | None = None

    async def launch(self, title: str) -> FakeWorker:
        return self

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._on_lost = callback

    def kill(self) -> None:
        self.die("killed by signal 9 (SIGKILL)")

    def die(self, cause: str) -> None:
        if self._on_lost is not None:
            callback, self._on_lost = self._on_lost, None
            self._theirs.close()
            callback(cause)

    async def stop(self, grace_s: float) -> None:
        self.die("exit code 0")

    def raw(self, data: bytes) -> None:
        self._theirs.sendall(data)


class Bench:
    """A session with a loaded model, and a request that its worker executes."""

    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.session = WorkerSession("m_0")
        self.lost: list[str] = []

    async def start(self) -> None:
        self.worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
        await self.session.start(self.worker)
        self.worker.channel.send(wire.Loaded(5))
        assert await self.session.load(wire.Load("{}", "", 1, "m_0")) == 5
        self.model = Model(model_spec("m", dims=(-1,)), ModelConfig(), 1, direct, FakeClock())
        self.model.start()
        self.polling = BusyPolling(50_000, processor_count=2)
        self.handle = WorkerHandle("m_0", self.session, self.model, LoopPoller(self.polling))
        self.session.on_lost = self._lost
        self.model.instances.add(self.handle)

    def _lost(self, cause: str) -> None:
        self.lost.append(cause)
        self.handle.lost(cause)

    def submit(self) -> Request:
        request = Request("m", [InputTensor("IN", "FP32", [1], bytes(4))], RecordingSink())
        self.model.submit(request)
        return request


def run(scenario: Callable[[Bench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = Bench()
        await bench.start()
        await scenario(bench)
        bench.model.close(ServerStopping(""))
        bench.worker.kill()
        await asyncio.sleep(0)
        assert bench.polling.in_flight == 0, "every request that was counted is over"

    asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.001)


def responses(request: Request) -> list[str]:
    assert isinstance(request.sink, RecordingSink)
    return ["ok" if r.error is None else type(r.error).__name__ for r in request.sink.responses]


def test_answers_that_were_sent_before_the_death_count() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        # The request was given number 1, and its batch number 2.
        bench.worker.channel.send(wire.Executed(2, [wire.ResponseRef()]))
        bench.worker.die("exit code 1")
        assert bench.lost == ["exit code 1"]
        assert responses(request) == ["ok"]

    run(scenario)


def test_a_worker_that_dies_fails_what_it_executes_and_nothing_else() -> None:
    async def scenario(bench: Bench) -> None:
        running, waiting = bench.submit(), bench.submit()
        await settle()
        bench.worker.die("killed by signal 11 (SIGSEGV)")
        assert responses(running) == ["WorkerLost"]
        assert responses(waiting) == []
        assert isinstance(running.sink, RecordingSink)
        error = running.sink.errors[0]
        assert isinstance(error, WorkerLost)
        assert "m_0" in error.message
        assert "SIGSEGV" in error.message

    run(scenario)


def test_a_worker_that_is_to_end_has_answered_everything_before() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        bench.model.instances.set_apart(bench.handle)
        drained = asyncio.ensure_future(bench.handle.drain())
        await settle()
        assert not drained.done()
        bench.worker.channel.send(wire.Responded(1, True, wire.ResponseRef()))
        await settle()
        assert responses(request) == ["ok"]
        assert not drained.done(), "the batch goes on"
        bench.worker.channel.send(wire.Executed(2))
        await drained
        await bench.handle.drain()
        bench.handle.stopped()

    run(scenario)


def test_nobody_waits_for_a_worker_that_is_lost() -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        bench.model.instances.set_apart(bench.handle)
        drained = asyncio.ensure_future(bench.handle.drain())
        await settle()
        bench.worker.die("exit code 1")
        await drained
        assert responses(request) == ["WorkerLost"]

    run(scenario)


@pytest.mark.parametrize(("others", "poll_ns"), [(0, 50_000), (1, 50_000), (2, 0)])
def test_a_worker_may_poll_while_few_requests_are_in_flight(others: int, poll_ns: int) -> None:
    async def scenario(bench: Bench) -> None:
        bench.polling.in_flight = others
        bench.submit()
        await settle()
        [_, execute] = map(wire.to_worker_decoder.decode, bench.worker.channel.receive() or ())
        assert isinstance(execute, wire.Execute)
        assert execute.poll_ns == poll_ns
        bench.worker.channel.send(wire.Executed(2, [wire.ResponseRef()]))
        await settle()
        assert bench.polling.in_flight == others
        bench.polling.in_flight = 0

    run(scenario)


@pytest.mark.parametrize(
    ("said", "second"), [(wire.InputsHeld([5]), []), (wire.Responded(5, True, wire.ResponseRef()), ["ok"])]
)
def test_what_is_said_of_a_request_out_of_turn_harms_no_other(said: wire.ToKernel, second: list[str]) -> None:
    async def scenario(bench: Bench) -> None:
        first = bench.submit()
        await settle()
        bench.worker.channel.send(wire.Executed(2, [wire.ResponseRef()]))  # so fast that two more are given at once
        await settle()
        requests = [request_with_large_input(bench) for _ in range(2)]  # numbers 3 and 5, batches 4 and 6
        await settle()
        bench.worker.channel.send(said)
        await settle()
        bench.worker.die("exit code 1")
        assert [responses(request) for request in (first, *requests)] == [["ok"], ["WorkerLost"], second]
        assert all(tensor.span is not None for tensor in requests[1].inputs), "it can be given to another worker"

    run(scenario)


HOSTILE = [
    b"\xff\xff\xff\xff",
    frame(b"\xc1 no msgpack"),
    frame(wire.encoder.encode(["NoSuchMessage", 1])),
    frame(wire.encoder.encode(wire.Executed(99))),
    frame(wire.encoder.encode(wire.Responded(99, True))),
    frame(wire.encoder.encode(wire.InputsHeld([99]))),
    frame(wire.encoder.encode(wire.InputsHeld([1, 1]))),
    frame(wire.encoder.encode(wire.InputsFreed([1]))),
    frame(wire.encoder.encode(wire.Loaded(1))),
    frame(wire.encoder.encode(wire.MetricsChanged(changes=[wire.MetricChange(1, 1.0)]))),
    frame(wire.encoder.encode(wire.MetricsChanged([wire.MetricFamilyRef("nv_inference_count", "", "counter")]))),
    frame(wire.encoder.encode(wire.Stop())),
    frame(wire.encoder.encode(wire.Responded(1, True, wire.ResponseRef(error_code="no such code")))),
    frame(
        wire.encoder.encode(
            wire.Responded(
                1, True, wire.ResponseRef([wire.TensorRef("OUT", "FP32", [1], None, wire.OUTPUT_ARENA, 0, 4)])
            )
        )
    ),
]


@pytest.mark.parametrize("data", HOSTILE)
def test_a_worker_that_sends_garbage_is_dropped_as_if_it_had_crashed(data: bytes) -> None:
    async def scenario(bench: Bench) -> None:
        request = bench.submit()
        await settle()
        bench.worker.raw(data)
        await settle()
        assert len(bench.lost) == 1
        assert responses(request) == ["WorkerLost"]

    run(scenario)


def request_with_large_input(bench: Bench) -> Request:
    """Submit a request whose input lies in the model's arena, all ones."""
    if bench.model.input_arena is None:
        bench.model.input_arena = Arena("inputs", 1 << 20)
    block = bench.model.input_arena.take(8192)
    assert block is not None
    block.view()[:] = b"\1" * 8192
    request = Request(
        "m", [InputTensor("IN", "UINT8", [8192], span=Span(block, block.offset, 8192))], RecordingSink(), leased=True
    )
    bench.model.submit(request)
    return request


def test_inputs_that_the_model_keeps_are_not_free_until_it_lets_them_go() -> None:
    async def scenario(bench: Bench) -> None:
        requests = [request_with_large_input(bench) for _ in range(2)]
        assert bench.model.input_arena is not None
        blocks = bench.model.input_arena.allocator
        await settle()
        bench.worker.channel.send(wire.InputsHeld([1]))
        bench.worker.channel.send(wire.Executed(2, [wire.ResponseRef()]))
        await settle()
        assert [responses(request) for request in requests] == [["ok"], []]
        assert blocks.block_count == 2
        bench.worker.channel.send(wire.InputsFreed([1]))
        await settle()
        assert blocks.block_count == 1
        bench.worker.channel.send(wire.InputsHeld([3]))
        bench.worker.channel.send(wire.Executed(4, [wire.ResponseRef()]))
        await settle()
        assert responses(requests[1]) == ["ok"]
        assert blocks.block_count == 1
        bench.worker.die("exit code 1")
        assert blocks.block_count == 0

    run(scenario)


def input_part(request: Request, name: str, offset: int, byte_size: int) -> wire.TensorRef:
    span = request.inputs[0].span
    assert span is not None
    return wire.TensorRef(name, "UINT8", [abs(byte_size)], None, span.region.number, span.offset + offset, byte_size)


def test_inputs_that_are_outputs_are_free_when_the_response_was_sent() -> None:
    async def scenario(bench: Bench) -> None:
        request = request_with_large_input(bench)
        await settle()
        parts = [input_part(request, "A", 0, 8192), input_part(request, "B", 4096, 4096)]
        bench.worker.channel.send(wire.Executed(2, [wire.ResponseRef(parts)]))
        await settle()
        assert isinstance(request.sink, RecordingSink)
        (response,) = request.sink.responses
        assert [bytes(output.data or b"") for output in response.outputs or ()] == [b"\1" * 8192, b"\1" * 4096]
        assert bench.model.input_arena is not None
        assert bench.model.input_arena.allocator.block_count == 1
        response.release()
        assert bench.model.input_arena.allocator.block_count == 0

    run(scenario)


@pytest.mark.parametrize(("offset", "byte_size"), [(-4096, 4096), (4096, 8192), (0, 8193), (0, -1)])
def test_an_output_outside_of_the_requests_inputs_ends_the_worker(offset: int, byte_size: int) -> None:
    async def scenario(bench: Bench) -> None:
        request = request_with_large_input(bench)
        await settle()
        part = input_part(request, "A", offset, byte_size)
        bench.worker.channel.send(wire.Executed(2, [wire.ResponseRef([part])]))
        await settle()
        assert responses(request) == ["WorkerLost"]

    run(scenario)


def test_an_input_that_is_an_output_before_the_last_ends_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        request = request_with_large_input(bench)
        await settle()
        bench.worker.channel.send(wire.Responded(1, False, wire.ResponseRef([input_part(request, "A", 0, 8192)])))
        await settle()
        assert responses(request) == ["WorkerLost"]

    run(scenario)


def test_metrics_of_the_model_arrive_and_end_with_the_worker() -> None:
    async def scenario(bench: Bench) -> None:
        families = [wire.MetricFamilyRef("count", "", "counter"), wire.MetricFamilyRef("level", "", "gauge")]
        created = [wire.MetricSeriesRef(1, "count"), wire.MetricSeriesRef(2, "level")]
        changes = [wire.MetricChange(1, 2.0), wire.MetricChange(2, 3.0, True)]
        bench.worker.channel.send(wire.MetricsChanged(families, created, changes))
        await settle()
        custom = bench.model.statistics.custom

        def shown() -> dict[str, float]:
            return {name: one.value for (name, _), family in custom.families.items() for one in family.series.values()}

        assert shown() == {"count": 2.0, "level": 3.0}
        bench.worker.die("exit code 1")
        assert shown() == {"count": 2.0}

    run(scenario)


def test_a_worker_of_another_protocol_is_refused() -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        worker.channel.send(wire.Hello(wire.PROTOCOL + 1, 1))
        with pytest.raises(InternalError, match="another protocol"):
            await session.start(worker)

    asyncio.run(main())


def test_a_worker_lost_while_it_loads_is_the_loads_error() -> None:
    async def main() -> None:
        worker, session = FakeWorker(), WorkerSession("m")
        worker.channel.send(wire.Hello(wire.PROTOCOL, 1))
        await session.start(worker)
        loading = asyncio.create_task(session.load(wire.Load("{}", "", 1, "m")))
        await asyncio.sleep(0)
        worker.die("exit code 3")
        with pytest.raises(InternalError, match="exit code 3"):
            await loading
        with contextlib.suppress(OSError):
            worker.channel.close()

    asyncio.run(main())
