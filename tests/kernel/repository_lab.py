"""Test doubles for the repository: instances that load immediately, and a lifecycle that uses them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel.errors import InternalError
from kernel.observe.execution_reports import ExecutionTimes
from kernel.repository.lifecycle import Lifecycle
from kernel.repository.settings import LifecycleSettings
from kernel.serving.catalog import Catalog
from kernel.serving.response import Response
from kernel.testing import FakeClock, FakeInstance

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kernel.repository.placement import InstancePlan
    from kernel.repository.worker_needs import WorkerNeeds
    from kernel.serving.batch import Batch
    from kernel.serving.model import Model, SchedulerFactory

#: The configuration of a model that loads.
CONFIG = """
backend: "identity"
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [1] }]
"""


class EchoInstance(FakeInstance):
    """An instance that responds to each batch in the next event-loop iteration; with `error`, unless it is empty."""

    def __init__(self, name: str, model: Model, error: str) -> None:
        super().__init__(name)
        self._model = model
        self._error = error
        #: For each batch, the data of each request's first input.
        self.executed: list[list[bytes]] = []

    def execute(self, batch: Batch) -> None:
        self.executed.append([bytes(request.inputs[0].data or b"") for request in batch.requests])
        asyncio.get_running_loop().call_soon(self.respond, batch)

    def respond(self, batch: Batch) -> None:
        for request in batch.requests:
            if self._error:
                request.fail(InternalError(self._error))
            else:
                request.respond(Response(request.model_name, "1", request.id, outputs=[]))
        self.record.executed(batch.number)
        self._model.instances.executed(self, batch, ExecutionTimes(0, 0, 0, 0))


class FakeKeeper:
    """Keeps an instance that loads immediately. A file `fail` in the version's folder fails the load with its text."""

    def __init__(self, made: list[FakeKeeper]) -> None:
        self.stopped = False
        self.pending: Callable[[str], None] = lambda text: None
        #: Whether it was stopped without finalizing its model.
        self.stopped_at_once = False
        #: `stop` waits for this event, if there is one.
        self.stopping: asyncio.Event | None = None
        #: The limit that `retire` got, in seconds.
        self.retired_with = 0.0
        #: The limit that `released` got, in seconds; 0 while it was not called.
        self.released_with = 0.0
        self.plan: InstancePlan | None = None
        self.instance: EchoInstance | None = None
        self.config = ""
        #: A load waits for this event, if there is one.
        self.gate: asyncio.Event | None = None
        #: The error of a load; empty to succeed.
        self.failure = ""
        #: The error of every response. Default: the text of the file `refuse` in the model's folder.
        self.refusal = ""
        #: The shared process that it was to start in.
        self.worker = ""
        #: How long its worker has used a processor, in nanoseconds; None if that is not known.
        self.demanded: int | None = None
        #: `retire` waits for this event, if there is one.
        self.finished: asyncio.Event | None = None
        made.append(self)

    async def start(self, title: str, needs: WorkerNeeds) -> None:
        self.worker = needs.worker

    async def complete(
        self, config: str, model_dir: str, version: int, backend_config: dict[str, str], *, verify: bool = False
    ) -> str:
        if verify and (failure := self.failure or _text(Path(model_dir, str(version), "fail"))):
            raise InternalError(failure)
        return config

    async def gpu_obstacle(self, config: str, model_dir: str, version: int, backend_config: dict[str, str]) -> str:
        return _text(Path(model_dir, "no_gpu"))

    async def load(self, plan: InstancePlan, config: str, together: int = 1) -> int:
        self.plan = plan
        self.config = config
        if failure := self.failure or _text(Path(plan.model_dir, str(plan.version), "fail")):
            raise InternalError(failure)
        if self.gate is not None:
            await self.gate.wait()
        return 1

    def demanded_ns(self) -> int | None:
        return self.demanded

    def join(self, model: Model) -> EchoInstance:
        assert self.plan is not None
        self.refusal = self.refusal or _text(Path(self.plan.model_dir, "refuse"))
        self.model = model
        self.instance = EchoInstance(self.plan.name, model, self.refusal)
        model.instances.set_apart(self.instance)
        return self.instance

    def serve(self) -> None:
        assert self.instance is not None
        self.model.instances.add(self.instance)

    def set_restart_config(self, config: str) -> None:
        self.config = config

    async def retire(self, limit_s: float) -> None:
        self.retired_with = limit_s
        if self.instance is not None:
            self.model.instances.set_apart(self.instance)
        if self.finished is not None:
            await self.finished.wait()

    async def released(self, limit_s: float) -> None:
        self.released_with = limit_s

    async def stop(self, *, at_once: bool = False) -> None:
        if self.stopping is not None:
            await self.stopping.wait()
        self.stopped, self.stopped_at_once = True, at_once


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class RepositoryLab:
    """A lifecycle with fake instances, and the folder of its model repository."""

    def __init__(self, root: Path, schedule: SchedulerFactory, settings: LifecycleSettings | None = None) -> None:
        self.root = root
        self.settings = settings or LifecycleSettings((root,), explicit=True)
        self.catalog = Catalog(namespacing=self.settings.namespacing)
        self.keepers: list[FakeKeeper] = []
        #: Passed to new keepers.
        self.gate: asyncio.Event | None = None
        self.failure = self.refusal = ""
        self.lifecycle = Lifecycle(self.catalog, FakeClock(), schedule, self._new_keeper, self.settings)

    def _new_keeper(self) -> FakeKeeper:
        keeper = FakeKeeper(self.keepers)
        keeper.gate, keeper.failure, keeper.refusal = self.gate, self.failure, self.refusal
        return keeper

    def write(self, name: str, versions: tuple[int, ...] = (1,), config: str = CONFIG) -> None:
        """Write a model to the repository, over one that is there."""
        for version in versions:
            (self.root / name / str(version)).mkdir(parents=True, exist_ok=True)
        (self.root / name / "config.pbtxt").write_text(config)

    def fail(self, name: str, version: int, reason: str) -> None:
        """Let later loads of a version fail."""
        (self.root / name / str(version) / "fail").write_text(reason)

    @property
    def alive(self) -> list[str]:
        """The names of the instances that were loaded and not stopped."""
        return sorted(k.plan.name for k in self.keepers if k.plan is not None and not k.stopped)


def run(lab: RepositoryLab, scenario: Callable[[RepositoryLab], Coroutine[Any, Any, None]]) -> None:
    """Run `scenario`, close the lifecycle, and check that all instances were stopped."""

    async def main() -> None:
        await scenario(lab)
        await lab.lifecycle.close()
        assert lab.alive == []

    asyncio.run(main())


async def settled() -> None:
    """Run ten event-loop iterations, so that background work finishes unless it waits for an event or a thread."""
    for _ in range(10):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Run event-loop iterations, and let threads run, until `condition` is true."""
    while not condition():  # noqa: ASYNC110 - the code under test sets no event to wait for
        await asyncio.sleep(0)
