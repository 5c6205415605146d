"""Doubles for tests of front doors: a real kernel with models in this process."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import RequestCancelled as CancelledError
from kernel.errors import ServingError
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.observe.execution_reports import ExecutionTimes
from kernel.records.tracer import Tracer
from kernel.serving.batch import Batch
from kernel.serving.catalog import Catalog, IndexItem, ModelState
from kernel.serving.events import Cancelled, Submitted
from kernel.serving.instance import BatchRecord
from kernel.serving.interface import KernelSettings
from kernel.serving.kernel import Kernel, KernelParts
from kernel.serving.model import Model
from kernel.settings import LogSettings, TraceSettings
from kernel.testing import FakeClock
from protocols.helper_tasks import TASKS
from protocols.openai.text_tasks import TASKS as TEXT_TASKS
from shm.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.helper_tasks import HelperTask, TaskResult
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.request import Request
    from protocols.frontend import FrontDoor

#: How long calls may take to end when the server of a test stops; tests take far less.
GRACE_S = 10


async def one_at_a_time(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
    """A scheduler that gives each request to an idle instance, as soon as there is one."""
    queue: deque[Request] = deque()
    while True:
        match await inbox.next():
            case Submitted(request=request):
                queue.append(request)
            case Cancelled(request=request) if request in queue:
                queue.remove(request)
                request.fail(CancelledError())
        while queue and (instance := instances.idle_instance()) is not None:
            instances.dispatch(instance, Batch([queue.popleft()]))


class InProcessInstance:
    """An instance that gives every request to a function, which responds to it now or later.

    It is idle again at once, so that any number of requests can wait for their responses.
    """

    def __init__(self, instances: InstanceSet, respond: Callable[[Request], None]) -> None:
        self.name = "in_process_0"
        self.record = BatchRecord()
        #: Requests whose client has disconnected, and responses that clients have taken, by request.
        self.cancelled: list[Request] = []
        self.credit: dict[Request, int] = {}
        self._instances = instances
        self._respond = respond

    def execute(self, batch: Batch) -> None:
        for request in batch.requests:
            self._respond(request)
        self.record.executed(batch.number)
        self._instances.executed(self, batch, ExecutionTimes(0, 1_000, 3_000, 6_000))

    def cancel(self, request: Request) -> None:
        self.cancelled.append(request)
        request.fail(CancelledError())

    def consumed(self, request: Request, count: int) -> None:
        self.credit[request] = self.credit.get(request, 0) + count

    def send_now(self) -> None:
        """Do nothing: batches are executed in this process."""

    def end_sequence(self, slot: int) -> None:
        """Do nothing: there is no implicit state."""


class RecordingRepository:
    """A model repository that records its calls, and fails with `error` if that is set."""

    def __init__(self, catalog: Catalog) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.error: Exception | None = None
        self._catalog = catalog

    async def index(self, ready: bool = False) -> list[IndexItem]:
        return self._catalog.index(ready)

    async def load(self, name: str, parameters: dict[str, Any] | None = None) -> None:
        self._note("load", name, parameters)

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        self._note("unload", name, unload_dependents)

    def _note(self, verb: str, name: str, more: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((verb, name, more))


class DirectHelpers:
    """Runs the functions of tasks in this process, at once. A `kernel.serving.helper_tasks.FrontDoorHelpers`."""

    idle, ready = False, True

    def start_ahead(self) -> None:
        """Do nothing: there is no process."""

    def __init__(self) -> None:
        #: The names of the tasks that were started.
        self.started: list[str] = []

    def add(self, task: HelperTask) -> None:
        self.started.append(task.name)
        steps = (TASKS.get(task.name) or TEXT_TASKS[task.name])(
            task.arguments, [memoryview(source.raw()) for source in task.sources]
        )
        try:
            message = next(steps)
            span = task.needs_memory(message)
            steps.send(span.lease.region.view(span.offset, span.byte_size))
        except StopIteration as stop:
            result: TaskResult = stop.value
            octets = b"".join(result.output)
            task.done(result.message, Tensor("", "UINT8", [len(octets)], octets) if result.output else None)
        except ServingError as error:
            task.failed(error)

    def cancel(self, task: HelperTask) -> None:
        """Do nothing: the task has ended."""


class LateHelpers(DirectHelpers):
    """Runs tasks when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[HelperTask] = []

    def add(self, task: HelperTask) -> None:
        self.waiting.append(task)

    def run_all(self) -> None:
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            super().add(task)


class FrontDoorLab:
    """A kernel with models that are functions. Its clock does not run."""

    def __init__(
        self,
        *,
        allow_client_shm: str = "local",
        arena_byte_size: int = 2**20,
        regions_are_owned: bool = False,
        traces: TraceSettings | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.catalog = Catalog()
        self.regions = RegionRegistry(owned=regions_are_owned)
        settings = KernelSettings(trace=traces or TraceSettings(), log=LogSettings(), allow_client_shm=allow_client_shm)
        self.repository = RecordingRepository(self.catalog)
        self.helpers = DirectHelpers()
        self.text_helpers = DirectHelpers()
        self.kernel = Kernel(
            self.catalog,
            self.regions,
            InputPlacer(self.regions, arena_byte_size),
            self.clock,
            settings,
            Tracer(settings.trace, self.clock),
            KernelParts(self.repository, self.helpers, self.text_helpers),
        )

    def add_model(self, spec: ModelSpec, respond: Callable[[Request], None], *, version: int = 1) -> InProcessInstance:
        """Add a version that is ready; returns the instance that executes its requests."""
        config = ModelConfig(name=spec.name, backend=spec.backend, max_batch_size=spec.max_batch_size)
        model = Model(spec, config, version, one_at_a_time, self.clock)
        model.start()
        instance = InProcessInstance(model.instances, respond)
        model.instances.add(instance)
        self.catalog.set_state(spec.name, version, ModelState.READY, model=model)
        return instance


@contextlib.asynccontextmanager
async def listening(make_door: Callable[[socket.socket], FrontDoor]) -> AsyncIterator[int]:
    """Serve on a free port of 127.0.0.1 while the block runs; the value is the port."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.bind(("127.0.0.1", 0))
    door = make_door(sock)
    try:
        await door.start()
        yield sock.getsockname()[1]
    finally:
        await door.stop(GRACE_S)
        sock.close()
