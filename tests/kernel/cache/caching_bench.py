"""A kernel with a cached model of one fake instance, whose helpers and cache do what the test says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kernel.cache.caching import ResponseCaching
from kernel.cache.local import LocalCache
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import InvalidArgument, ServerStopping
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.observe.execution_reports import ExecutionTimes
from kernel.records.tracer import Tracer
from kernel.serving.catalog import Catalog, ModelState
from kernel.serving.interface import KernelSettings
from kernel.serving.kernel import Kernel
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.serving.response import Response
from kernel.settings import LogSettings, TraceSettings
from kernel.testing import FakeClock, FakeInstance, RecordingSink, model_spec
from protocols.helper_tasks import TASKS
from schedulers.direct import direct
from shm.arena import Arena
from shm.blocks import ByteBudget
from shm.tensor import Span, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.cache.interface import CachedResponse, ResponseCache
    from kernel.errors import ServingError
    from kernel.serving.helper_tasks import HelperTask
    from shm.tensor import Buffer, RequestedOutput


from kernel.serving.interface import CacheFigures
from shm.tensor import RequestedOutput


class FakeHelpers:
    """Runs tasks in this process, and reads and writes regions; all of it waits for `gate` if there is one."""

    def __init__(self) -> None:
        self.arena = Arena("helper", 1 << 24)
        self.gate: asyncio.Event | None = None
        #: Raised by everything.
        self.error: ServingError | None = None
        self.tasks = 0
        self._runs: set[asyncio.Task[None]] = set()

    def add(self, task: HelperTask) -> None:
        self.tasks += 1
        run = asyncio.get_running_loop().create_task(self._run(task))
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)

    def cancel(self, task: HelperTask) -> None:
        """Do nothing: a task that runs ends as if it was not cancelled."""

    async def _run(self, task: HelperTask) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            task.failed(self.error)
            return
        steps = TASKS[task.name](task.arguments, [memoryview(source.raw()) for source in task.sources])
        try:
            next(steps)
        except StopIteration as end:
            task.done(end.value.message, None)

    async def read(self, span: Span) -> Span:
        await self._wait()
        data = region_bytes(span)
        block = self.arena.take(span.byte_size)
        assert block is not None
        block.view()[:] = data
        return block.span

    async def write(self, data: Buffer, target: Span) -> None:
        await self._wait()
        region = target.lease.region
        os.pwrite(region.fd, data, region.offset + target.offset)

    async def _wait(self) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error


def region_bytes(span: Span) -> bytes:
    region = span.lease.region
    data = os.pread(region.fd, span.byte_size, region.offset + span.offset)
    if len(data) < span.byte_size:
        raise InvalidArgument("the region was shortened")
    return data


class CachingBench:
    """A kernel with the model `m`, which has a cache."""

    def __init__(self, cache: ResponseCache | None = None) -> None:
        self.clock, self.budget = FakeClock(), ByteBudget(1 << 28)
        self.catalog, self.regions, self.helpers = Catalog(), RegionRegistry(), FakeHelpers()
        self.cache = cache or LocalCache(1 << 24, self.budget)
        self.caching = ResponseCaching(
            self.cache, self.catalog, helpers=self.helpers, regions=self.helpers, clock=self.clock
        )
        self.placer = InputPlacer(self.regions, 1 << 28, self.budget)
        settings = KernelSettings(TraceSettings(), LogSettings())
        tracer = Tracer(settings.trace, self.clock)
        self.kernel = Kernel(self.catalog, self.regions, self.placer, self.clock, settings, tracer)
        self.model: Model
        self.instance: FakeInstance

    async def load(self, **more: object) -> None:
        """Load the model `m`, or load it again; `more` are fields of its specification."""
        name = "m"
        spec = msgspec.structs.replace(model_spec(name, dims=(-1,)), **{"response_cache": True, **more})
        self.model = Model(spec, ModelConfig(name=name), 1, direct, self.clock)
        await self.caching.extend(self.model, Path("/nowhere"))
        self.model.start()
        self.instance = FakeInstance(f"{name}_0", concurrency=100)
        self.model.instances.add(self.instance)
        self.catalog.set_state(name, 1, ModelState.READY, "", self.model)

    def request(self, data: bytes | Tensor = b"1234", outputs: list[RequestedOutput] | None = None) -> Request:
        tensor = data if isinstance(data, Tensor) else Tensor("IN", "FP32", [len(data) // 4], data)
        return Request("m", [tensor], RecordingSink(), outputs=outputs or [])

    def submit(self, *args: object) -> Request:
        sent = self.request(*args)  # type: ignore[arg-type]
        self.kernel.submit(sent)
        return sent

    @property
    def executing(self) -> int:
        """How many requests the instance has."""
        return len(self.instance.batches)

    def execute(self, data: bytes = b"out!", **more: object) -> None:
        """Let the instance respond to its first request with an output, or as `more` says."""
        batch = self.instance.batches.popleft()
        self.instance.record.started(batch.number)
        [request] = batch.requests
        fields: dict[str, object] = {"outputs": [Tensor("OUT", "FP32", [len(data) // 4], data)], **more}
        leased = any(each.span is not None for each in fields["outputs"] or ())  # type: ignore[attr-defined]
        request.respond(Response("m", "1", request.id, leased=leased, **fields))  # type: ignore[arg-type]
        self.instance.record.executed(batch.number)
        self.model.instances.executed(self.instance, batch, ExecutionTimes(0, 0, 0, 0))

    async def close(self) -> None:
        self.model.close(ServerStopping(""))
        await self.caching.close()
        self.regions.close()
        assert self.budget.used_byte_size == 0
        assert self.helpers.arena.allocator.block_count == 0
        self.helpers.arena.close()


def responses(of: Request) -> list[Response]:
    """Return what the client got."""
    assert isinstance(of.sink, RecordingSink)
    return of.sink.responses


def data_of(request: Request) -> bytes:
    """Return the bytes of the only output of the only response, and release it."""
    [response] = responses(request)
    assert response.error is None, response.error
    assert response.outputs is not None
    [output] = response.outputs
    data = bytes(output.raw())
    response.release()
    return data


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class SlowCache:
    """A cache that finds what the test says, when the test says."""

    shared = True

    def __init__(self) -> None:
        self.figures = CacheFigures()
        self.asked: list[Callable[[CachedResponse | None], None]] = []
        self.stored: list[bytes] = []

    def lookup(self, key: bytes, found: Callable[[CachedResponse | None], None], expected: object) -> None:
        self.asked.append(found)

    def insert(self, key: bytes, outputs: object, parameters: object, expected: object) -> bool:
        self.stored.append(key)
        return True

    async def close(self) -> None:
        """Nothing to free."""
