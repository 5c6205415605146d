"""Runs a scenario: a real kernel with real models and schedulers, in simulated time.

Nothing here depends on the time of day, on hashes, or on other processes, so that a seed always has the same story.
"""

from __future__ import annotations

import asyncio
import heapq
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kernel import errors
from kernel.loop.busy_poll import BusyPolling, LoopPoller
from kernel.memory.client_regions import RegionRegistry
from kernel.memory.input_placement import InputPlacer
from kernel.records.tracer import Tracer
from kernel.repository.retirement import Retirement
from kernel.serving.catalog import UNLOADED, Catalog, ModelState
from kernel.serving.interface import KernelSettings
from kernel.serving.kernel import Kernel
from kernel.settings import LogSettings, TraceSettings
from schedulers.ratelimit import RateLimiter
from schedulers.registry import choose_scheduler
from shm.blocks import ByteBudget
from tests.simulation.clients import Client, InnerRequest
from tests.simulation.clock import SimulatedClock
from tests.simulation.story import Story
from tests.simulation.versions import PlannedFailure, SimulatedVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from kernel.serving.model import SchedulerFactory
    from kernel.serving.request import Request
    from tests.simulation.checks import Checks
    from tests.simulation.kinds import Kind
    from tests.simulation.plan import RequestPlan, Scenario

#: A scenario that goes on for longer in simulated time does not end.
_LONGEST_NS = 60_000_000_000
#: Event-loop iterations in which tasks that wait for events go on.
_TASK_ITERATIONS = 8
#: Event-loop iterations in a row in which something waits for the end of the iteration: far more than a scenario needs.
_MOST_ITERATIONS = 10_000


class Violation(AssertionError):
    """Something does not hold that must."""


class World:
    """One run of one scenario."""

    def __init__(
        self, scenario: Scenario, kinds: dict[str, Kind], schedule: Callable[..., Any] = choose_scheduler
    ) -> None:
        """`schedule` replaces `choose_scheduler`: a test breaks a scheduler and sees that it is found."""
        self.scenario = scenario
        self.kind = kinds.__getitem__
        self.story = Story()
        self.clock = SimulatedClock(scenario.lateness_ns)
        self.poller = LoopPoller(BusyPolling(0, 1))
        self.no_regions = None
        self.budget = ByteBudget(4 * scenario.arena_byte_size)
        regions = RegionRegistry(budget=self.budget)
        self.catalog = Catalog()
        placer = InputPlacer(regions, scenario.arena_byte_size, self.budget)
        settings = KernelSettings(trace=TraceSettings(), log=LogSettings())
        tracer = Tracer(settings.trace, self.clock)
        self.kernel = Kernel(self.catalog, regions, placer, self.clock, settings, tracer)
        self.schedule: SchedulerFactory = partial(schedule, caller=self.kernel)
        #: Shared by all models that need resources.
        self.limiter = RateLimiter()
        self.limited: list[Checks] = []
        self.retirement = Retirement(self.catalog, 0 if scenario.impatient_unload else 300)
        self.clients: list[Client] = []
        #: Requests of steps, and calls of models.
        self.inner: list[InnerRequest] = []
        self._client_of: dict[Request, Client] = {}
        #: By the number of the model in the scenario; None while it is unloaded.
        self.serving: list[SimulatedVersion | None] = [None] * len(scenario.models)
        #: All versions that were ever loaded.
        self.versions: list[SimulatedVersion] = []
        self.draining = self.abandoned = False
        #: The next restarts of workers that fail.
        self.failing_restarts = 0
        self.violation: Violation | None = None
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._event_count = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.steps = 0
        self._closing = False

    # ---- for all parts -----------------------------------------------------------------------

    def tell(self, text: str, *values: object) -> None:
        """Add a line to the story."""
        if not self._closing:
            self.story.tell(self.clock.time_ns, text, *values)

    def check(self, holds: bool, text: str, *values: object) -> None:
        """End the run unless `holds`."""
        if not holds and not self._closing:
            violation = Violation(text % values)
            self.violation = self.violation or violation  # a scheduler that raises is only restarted
            raise violation

    def after(self, delay_ns: int, callback: Callable[[], None]) -> None:
        """Call `callback` after `delay_ns`, never within this call."""
        self._event_count += 1
        heapq.heappush(self._events, (self.clock.time_ns + delay_ns, self._event_count, callback))

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    @property
    def is_over(self) -> bool:
        """Whether nothing comes from outside any more."""
        actions = self.scenario.actions
        return not actions or self.clock.time_ns - self.story.start_ns > actions[-1].at_ns

    def client_of(self, request: Request) -> Client:
        """Return who sent a request."""
        client = self._client_of.get(request)
        if client is None:
            client = self._client_of[request] = self._inner(request)
        return client

    def _inner(self, request: Request) -> Client:
        """Return the client of a request that an ensemble has submitted, or that a model has sent."""
        plans = self.scenario.models
        index = next(number for number, plan in enumerate(plans) if plan.spec.name == request.model_name)
        outer = self.clients[int(request.id.partition("/")[0])]
        self.tell("%s is a %s for %s", outer, "call" if "/" in request.id else "step", request.model_name)
        inner = InnerRequest(self, request, outer.plan, index)
        self.inner.append(inner)
        return inner

    def scheduler_failed(self, version: SimulatedVersion, error: Exception) -> None:
        """A scheduler has raised `error`."""
        self.tell("the scheduler of %s fails: %r", version.title, error)
        self.check(isinstance(error, PlannedFailure), "the scheduler of %s failed: %r", version.title, error)

    def restart_fails(self) -> bool:
        """Whether the restart of a worker that is tried now fails."""
        fails = self.failing_restarts > 0
        self.failing_restarts -= fails
        return fails

    # ---- models ------------------------------------------------------------------------------

    def load(self, index: int) -> None:
        """Load a model, or load it again: the version before finishes its requests."""
        plan = self.scenario.models[index]
        version = SimulatedVersion(self, plan, index, 1 + sum(each.index == index for each in self.versions))
        former, self.serving[index] = self.serving[index], version
        self.versions.append(version)
        version.start()
        self.catalog.set_state(plan.spec.name, 1, ModelState.READY, "", version.model)
        if former is not None:
            self._retire(former)

    def unload(self, index: int) -> None:
        """Unload a model; its requests finish."""
        version, self.serving[index] = self.serving[index], None
        if version is not None:
            self.catalog.set_state(version.plan.spec.name, 1, ModelState.UNAVAILABLE, UNLOADED)
            self._retire(version)

    def _retire(self, version: SimulatedVersion) -> None:
        version.retired = True
        self.start_task(self.retirement.end_version(version))  # type: ignore[arg-type]  # what it uses of LoadedVersion

    # ---- requests ----------------------------------------------------------------------------

    def submit(self, index: int, plan: RequestPlan) -> None:
        """A client sends a request."""
        model = self.scenario.models[index]
        spec = model.spec
        client = Client(self, len(self.clients), index, plan)
        self.clients.append(client)
        request = client.make(spec.name, batching=spec.max_batch_size > 0, streaming=spec.decoupled)
        self._client_of[request] = client
        self.tell("%s for %s: %s", client, spec.name, _described(plan))
        self.kernel.submit(request)
        if (error := client.refusal) is not None:
            self.tell("%s is refused: %s", client, error.message)
            allowed = self._may_refuse(index, plan, error)
            self.check(allowed, "%s is refused without a reason: %s", client, error.message)
            self.check(not client.responses, "%s is refused and has a response", client)
            self.check(client.version is None, "%s is refused and queued", client)
            return
        if plan.patience_ns is not None:
            self.after(plan.patience_ns, client.leave)

    def _may_refuse(self, index: int, plan: RequestPlan, error: errors.ServingError) -> bool:
        match error:
            case errors.ServerStopping():
                return self.draining
            case errors.ModelNotReady() | errors.NoAvailableVersion() | errors.ModelNotFound():
                return self.serving[index] is None
            case errors.NoMemory():
                return self.budget.used_byte_size > 0 or 4 * plan.rows * plan.width > self.scenario.arena_byte_size
        version = self.serving[index]
        if version is not None and error.message.startswith("no instance of model"):
            return version.restarts_failed > 0 and not version.model.instances.count
        return version is not None and version.checks.may_refuse(plan, error)

    def responded(self, client: Client) -> None:
        """A client has its final response."""
        assert client.version is not None
        self.check(client.ended, "%s has its final response, and its model does not know", client)
        client.version.checks.delivered(client)
        if client.plan.follow_up and not client.left and not self.draining:
            self.tell("the client of %s sends the next request", client)
            self.submit(client.model, _without_follow_up(client.plan))

    def drain(self) -> None:
        """The server stops: it finishes what it has."""
        self.draining = True
        self.start_task(self.kernel.drain())

    def abandon(self) -> None:
        """The time of the stop is over."""
        self.draining = self.abandoned = True
        self.kernel.stopping = True
        self.kernel.abandon()

    # ---- time --------------------------------------------------------------------------------

    async def run(self, actions: dict[str, Callable[..., None]]) -> None:
        """Run the scenario to its end. Raises `Violation`, or what the kernel raises."""
        try:
            self.story.begin(self.clock.time_ns)
            for index in range(len(self.scenario.models)):
                self.load(index)
            for action in self.scenario.actions:
                self.after(action.at_ns, lambda action=action: actions[action.verb](self, action))  # type: ignore[misc]
            await self._settle()
            longest_ns = self.clock.time_ns + _LONGEST_NS
            while (now_ns := self._next_ns()) is not None:
                self.check(now_ns < longest_ns, "the scenario does not end")
                self.clock.time_ns = now_ns
                await self._step(now_ns)
            self._check_end()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.close()

    def _next_ns(self) -> int | None:
        alarm_ns = self.clock.next_alarm_ns()
        event_ns = self._events[0][0] if self._events else None
        if alarm_ns is None or event_ns is None:
            return event_ns if alarm_ns is None else alarm_ns
        return min(alarm_ns, event_ns)

    async def _step(self, now_ns: int) -> None:
        """Do all that is due: one or more event-loop iterations."""
        if not self.scenario.actions_first:
            self.clock.ring_due()
        while self._events and self._events[0][0] <= now_ns:
            heapq.heappop(self._events)[2]()
        self.clock.ring_due()
        await self._settle()

    async def _settle(self) -> None:
        self.steps += 1
        for _ in range(_TASK_ITERATIONS):
            self._end_iterations()
            self._tasks = [task for task in self._tasks if not _ended(task)]
            if not self._tasks:
                break
            await asyncio.sleep(0)
        self._end_iterations()
        if not (self._events and self._events[0][0] <= self.clock.time_ns):
            self._check_rest()

    def _end_iterations(self) -> None:
        """End event-loop iterations until nothing waits for the end of one."""
        for _ in range(_MOST_ITERATIONS):
            if not self.clock.waits_for_iteration_end:
                return
            self.clock.end_iteration()
        self.check(False, "the event loop never comes to rest")

    # ---- checks ------------------------------------------------------------------------------

    def _check_rest(self) -> None:
        if self.violation is not None:
            raise self.violation
        for version in self.versions:
            model = version.model
            if version.closed:
                continue
            model.check()
            self.check(model.in_flight == version.waiting, "%s has %s requests in flight, %s have no response",
                       version.title, model.in_flight, version.waiting)  # fmt: skip
            for instance in version.instances:
                worker, handle = instance.worker, instance.handle
                if worker is not None and handle is not None:
                    known = {*worker.executing, *(message.batch for message in worker.waiting)}
                    self.check(known == handle.record.batches.keys(), "%s has batches %s, recorded are %s",
                               instance.name, known, list(handle.record.batches))  # fmt: skip
            version.checks.at_rest()
        self.kernel.calls.check()
        in_flight = sum(version.waiting_roots for version in self.versions)
        self.check(self.kernel.in_flight == in_flight, "the kernel counts %s requests in flight, there are %s",
                   self.kernel.in_flight, in_flight)  # fmt: skip

    def _check_end(self) -> None:
        """Nothing happens any more: each request has its response, and nothing is left."""
        if self.violation is not None:
            raise self.violation
        for client in [*self.clients, *self.inner]:
            self.check(not client.waits, "%s never gets its final response", client)
        self.check(not self._tasks, "a drain or an unload never ends")
        for version in self.versions:
            version.checks.at_end()
            statistics, title = version.model.statistics, version.title
            counted = statistics.success.count + statistics.fail.count + statistics.refused
            self.check(counted == version.accepted, "%s counts %s requests of %s", title, counted, version.accepted)
            arena = version.model.input_arena
            if arena is not None:
                self.check(not arena.charged, "%s keeps blocks: %s", title, arena.charged)
        self.limiter.check()
        self.check(not len(self.kernel.calls.waits), "calls are recorded that have ended")
        self.check(not self.budget.used_byte_size, "%s bytes are still charged", self.budget.used_byte_size)

    def close(self) -> None:
        """Free the memory of the models. What a run that was ended leaves behind is of no interest."""
        self._closing = True
        for version in self.versions:
            version.model.close(errors.ServerStopping(""))


def _ended(task: asyncio.Task[None]) -> bool:
    if not task.done():
        return False
    task.result()  # raises what the task raised
    return True


def _without_follow_up(plan: RequestPlan) -> RequestPlan:
    return msgspec.structs.replace(plan, follow_up=False)


def _described(plan: RequestPlan) -> str:
    """Return what a request asks for beyond the usual."""
    words = [f"{plan.rows} rows" if plan.rows > 1 else "1 row"]
    words += [f"width {plan.width}"] if plan.width > 1 else []
    words += [f"priority {plan.priority}"] if plan.priority else []
    words += [f"timeout {plan.timeout_us} us"] if plan.timeout_us else []
    words += [f"sequence {plan.correlation_id}"] if plan.correlation_id else []
    words += ["start"] if plan.start else []
    words += ["end"] if plan.end else []
    words += [f"{name}={value}" for name, value in plan.parameters.items()]
    words += [f"leaves after {plan.patience_ns / 1e6:g} ms"] if plan.patience_ns is not None else []
    return ", ".join(words)
