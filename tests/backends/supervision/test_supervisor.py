"""Instances over their workers: one that takes too long to load is ended, one that leaves is not replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from backends.helper.process import Helper
from backends.launch.launcher import Pending, not_shown
from backends.launch.output import OutputLimits, WorkerOutput
from backends.supervision.instance_watch import ExecutionLimits
from backends.supervision.supervisor import InstanceSupervisor
from backends.supervision.watchdog import Watchdog
from backends.transport import wire
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import InternalError, ServerStopping
from kernel.loop.busy_poll import BusyPolling, LoopPoller
from kernel.repository.placement import InstancePlan
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds
from kernel.serving.model import Model
from kernel.serving.request import Request
from kernel.testing import FakeClock, RecordingSink, model_spec
from schedulers.direct import direct
from shm.tensor import Tensor
from tests.backends.supervision.played_worker import FakeWorker

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from backends.launch.launcher import Launcher


class SilentWorker(FakeWorker):
    """Says hello, and then nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.channel.send(wire.Hello(wire.PROTOCOL, 1))
        self.killed = False
        self.launched = 0
        self.output = WorkerOutput("m_0", OutputLimits(), FakeClock())

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> SilentWorker:
        self.launched += 1
        return self

    def kill(self) -> None:
        self.killed = True
        super().kill()


def supervisor_of(worker: Launcher, *, load_timeout_s: float = 0) -> InstanceSupervisor:
    return InstanceSupervisor(
        worker,
        LoopPoller(BusyPolling(0, 1)),
        Helper(worker, 1 << 20),
        arena_byte_size=1 << 20,
        verbose=0,
        watchdog=Watchdog(),
        limits=ExecutionLimits(),
        load_timeout_s=load_timeout_s,
    )


@pytest.mark.parametrize("step", ["loading", "completing its configuration"])
def test_a_model_that_takes_too_long_to_load_loses_its_worker(step: str) -> None:
    async def scenario() -> None:
        worker = SilentWorker()
        supervisor = supervisor_of(worker, load_timeout_s=0.001)
        await supervisor.start("m")
        if step == "loading":
            work: Awaitable[object] = supervisor.load(InstancePlan("m_0", "/m", 1), "{}")
        else:
            work = supervisor.complete("{}", "/m", 1, {})
        with pytest.raises(InternalError) as caught:
            await work
        assert (
            caught.value.message
            == f"the model was still {step} after 0.001 s (--model-load-timeout-secs), and its worker was killed"
        )
        assert worker.killed
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_worker_gets_its_cpus_and_its_backends_settings() -> None:
    async def scenario() -> None:
        worker = SilentWorker()
        supervisor = supervisor_of(worker)
        await supervisor.start("m")
        worker.channel.send(wire.Loaded(5))
        plan = InstancePlan("m_0", "/m", 1, cpus=(2, 3), backend_config={"a": "b"})
        load = asyncio.ensure_future(supervisor.load(plan, "{}"))
        received: list[bytes] | None = []
        while not received:
            await asyncio.sleep(0)
            received = worker.channel.receive(wait=False)
        message = wire.to_worker_decoder.decode(received[0])
        assert isinstance(message, wire.Load)
        assert (message.cpus, message.backend_config) == ((2, 3), {"a": "b"})
        assert await load == 5
        await supervisor.stop()

    asyncio.run(scenario())


def test_a_worker_that_dies_while_its_instance_leaves_is_not_replaced() -> None:
    async def scenario() -> None:
        worker = SilentWorker()
        supervisor = supervisor_of(worker)
        await supervisor.start("m")
        worker.channel.send(wire.Loaded(5))
        await supervisor.load(InstancePlan("m_0", "/m", 1), "{}")
        model = Model(model_spec("m"), ModelConfig(), 1, direct, FakeClock())
        model.start()
        supervisor.join(model)
        assert model.instances.count == 0
        supervisor.serve()
        assert model.instances.count == 1
        request = Request("m", [Tensor("IN", "FP32", [1], bytes(4))], RecordingSink())
        model.submit(request)
        leaving = asyncio.ensure_future(supervisor.retire(60))
        await asyncio.sleep(0)
        assert model.instances.count == 0
        assert not leaving.done()
        worker.kill()
        await leaving
        await supervisor.stop()
        assert request.failed
        assert worker.launched == 1
        model.close(ServerStopping(""))

    asyncio.run(scenario())
