"""Loaded versions of simulated models and their instances: real models and handles, simulated workers.

An instance does what `InstanceSupervisor` does, in simulated time.
"""

from __future__ import annotations

import types
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import NotFinishedInTime, Unavailable
from kernel.repository.autoscaling import Autoscaler, LoadSample
from kernel.serving.events import InstanceLost, RequestRescheduled, Submitted
from kernel.serving.sequence_model import SequenceInstances, loaded_model
from tests.simulation.workers import SimulatedHandle, SimulatedWorker

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.events import Event
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.request import Request
    from kernel.serving.response import Response
    from tests.simulation.plan import ModelPlan
    from tests.simulation.world import World


class PlannedFailure(RuntimeError):
    """A scheduler failed because the scenario says so."""


class SimulatedVersion:
    """A model version with its instances. The part of `LoadedVersion` that `Retirement` uses."""

    def __init__(self, world: World, plan: ModelPlan, index: int, load_number: int) -> None:
        self.world = world
        self.plan = plan
        self.index = index
        self.title = f"{plan.spec.name}#{load_number}"
        self._random = Random(f"{world.scenario.seed} {self.title}")
        self.retired = self.closed = False
        self.accepted = 0
        #: Accepted requests without a final response.
        self.waiting = 0
        #: The same, without those that ensembles have made.
        self.waiting_roots = 0
        self.workers_lost = self.restarts_failed = self.planned_failures = 0
        #: The scheduler fails at its next event.
        self.fails_next = False
        #: Whether an instance was taken out of service for some time, or for good.
        self.changed = False
        self._first_order = 0
        model = self.model = loaded_model(plan.spec, ModelConfig(), 1, self._schedule, world.clock)
        self._post = model.inbox.post
        self._model_responded = model.responded
        # Every request passes here on its way to the scheduler, and every response on its way to the client.
        model.inbox.post = self._posted  # type: ignore[method-assign]
        model.responded = self._responded  # type: ignore[method-assign]
        self._recover = model.inbox._on_crash
        model.inbox._on_crash = self._crashed
        self.instances: list[SimulatedInstance] = []
        self.checks = world.kind(plan.kind).checks(world, self)
        self.instances += [SimulatedInstance(self, number) for number in range(plan.instances)]
        self._last_instance = plan.instances - 1

    # ---- the scheduler -----------------------------------------------------------------------

    def _schedule(
        self, spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock
    ) -> Coroutine[int | None, Event, None]:
        breakable = _BreakableInbox(self, inbox)
        return self.world.schedule(spec, breakable, instances, clock)  # type: ignore[arg-type]  # the same interface

    def _crashed(self, error: Exception) -> None:
        self.planned_failures += isinstance(error, PlannedFailure)
        self.world.scheduler_failed(self, error)
        self._recover(error)

    # ---- requests ----------------------------------------------------------------------------

    def _posted(self, event: Event) -> None:
        if isinstance(event, Submitted):
            self._take(event.request)
        elif isinstance(event, RequestRescheduled):
            client = self.world.client_of(event.request)
            self.world.tell("the model gives %s back, to execute it again", client)
            client.settled = False
            self.checks.given_back(client)
        self._post(event)

    def _take(self, request: Request) -> None:
        """A request is about to be queued."""
        client = self.world.client_of(request)
        self.accepted += 1
        self.waiting += 1
        self.waiting_roots += request.parent is None
        client.version = self
        client.order = self.accepted
        client.queued_ns = self.world.clock.now_ns()
        self.checks.submitted(client)

    def _responded(self, request: Request, response: Response) -> None:
        """The model responds to a request; the client gets that now or later."""
        self._model_responded(request, response)
        client = self.world.client_of(request)
        client.error = client.error or response.error
        if response.final:
            client.ended = True
            client.final = client.final or client.is_inner
            self.waiting -= 1
            self.waiting_roots -= request.parent is None
            if client.is_inner:
                self.world.tell("%s ends%s", client, f": {response.error.message}" if response.error else "")
            self.checks.responded(client, response.error)

    def returns(self, handle: SimulatedHandle, numbers: list[int] | None = None) -> None:
        """The requests of a lost instance that it has not begun come before all others; or those of these batches,
        which it was asked to return."""
        batches = handle.record.batches
        returned = [batches[number] for number in (batches if numbers is None else numbers)]
        clients = [self.world.client_of(request) for batch in returned for request in batch.requests]
        self._first_order -= len(clients)
        for number, client in enumerate(clients):
            client.order = self._first_order + number
            client.queued_ns = self.world.clock.now_ns()
            client.settled = False
        self.checks.lost(clients)

    def execution_ns(self) -> int:
        """Return the time of the next execution."""
        return self._random.choice(self.plan.execution_ns)

    def fails(self) -> bool:
        """Whether the model answers the next request with an error."""
        return self._random.randrange(100) < self.plan.failure_percent

    # ---- instances ---------------------------------------------------------------------------

    def start(self) -> None:
        """Load: start the scheduler and put all instances in service."""
        self.model.start()
        for instance in self.instances:
            instance.start()
            instance.serve()
        if self.plan.autoscale is not None:
            decider = Autoscaler(self.plan.autoscale, self.plan.instances)
            self.world.after(decider.interval_ns, partial(self._scale, decider))

    def _scale(self, decider: Autoscaler) -> None:
        """Take a sample and change the number of instances, as `kernel.repository.autoscaling` does."""
        world, instances = self.world, self.model.instances
        if self.retired or (world.is_over and not self.waiting):
            return
        left = [each for each in self.instances if not each.retired]
        if len(left) != decider.count:
            decider.changed(len(left))
        free, idle = instances.spare_counts()
        waiting = self.model.live.queued + instances.waiting
        wanted = decider.look(LoadSample(world.clock.now_ns(), waiting, instances.count, free, idle))
        if wanted != len(left):
            world.tell("%s has %s instances and gets %s", self.title, len(left), wanted)
            for _ in range(len(left), wanted):
                self.grow(self.plan.restart_ns)
            for each in left[wanted:]:
                world.start_task(world.retirement.end_instance(each))  # type: ignore[arg-type]  # as in `actions`
            self.retired = self.retired or (wanted < len(left) and world.scenario.impatient_unload)
            decider.changed(wanted)
        world.after(decider.interval_ns, partial(self._scale, decider))

    def grow(self, load_ns: int) -> None:
        """Add an instance, which is in service after `load_ns`."""
        self._last_instance += 1
        instance = SimulatedInstance(self, self._last_instance)
        self.instances.append(instance)
        instance.start()
        self.world.after(load_ns, instance.serve)

    @property
    def instances_changed(self) -> bool:
        """Whether there were times with one instance in service and times with more."""
        return self.workers_lost > 0 or self._last_instance != self.plan.instances - 1 or self.changed

    def idle_handles(self) -> list[SimulatedHandle]:
        """Return the instances in service that execute fewer batches than they could."""
        handles = [each.handle for each in self.instances if each.handle is not None]
        return [h for h in handles if self.is_serving(h) and len(h.record.batches) < h.record.concurrency]

    def is_serving(self, handle: SimulatedHandle) -> bool:
        """Whether the scheduler may use an instance: it is in service, or finishes its sequences."""
        instances = self.model.instances
        leaving = instances._leaving if isinstance(instances, SequenceInstances) else ()
        return handle in instances.serving or handle in leaving

    async def leave(self) -> None:
        """As `LoadedVersion.leave`: no repository agent is told."""

    async def released(self, limit_s: float) -> None:
        """As `LoadedVersion.released`: there are no devices."""

    async def stop(self, *, at_once: bool = False) -> None:
        """End all workers."""
        self.closed = True
        for instance in self.instances:
            await instance.stop(at_once=at_once)


class SimulatedInstance:
    """One instance, over any number of workers. The part of `InstanceKeeper` that `Retirement` uses."""

    def __init__(self, version: SimulatedVersion, number: int) -> None:
        self._version = version
        self._world = version.world
        self.name = f"{version.title}_{number}"
        self.worker: SimulatedWorker | None = None
        self.handle: SimulatedHandle | None = None
        self.retired = self.stopped = self._serving = False
        self._ending: NotFinishedInTime | None = None

    def start(self) -> None:
        """Start a worker, set apart or, after a loss, in service."""
        version = self._version
        worker = self.worker = SimulatedWorker(self._world, version, self.name)
        handle = self.handle = SimulatedHandle(
            self.name,
            worker,  # type: ignore[arg-type]  # what it uses of a session
            version.model,
            self._world.poller,
            self._world.no_regions,  # type: ignore[arg-type]  # only for workers without shared memory
            calls=self._world.kernel.calls if version.plan.calls else None,
        )
        handle.version = version
        worker.handle = handle
        if self._serving:
            version.model.accept()
            version.model.instances.add(handle)
        else:
            version.model.instances.set_apart(handle)

    def serve(self) -> None:
        """Put the instance in service."""
        if self.retired or self.stopped:
            return
        self._serving = True
        if self.handle is not None and self.worker is not None and not self.worker.paused:
            self._version.model.accept()
            self._version.model.instances.add(self.handle)

    def lose(self, cause: str) -> None:
        """The worker dies."""
        worker, handle = self.worker, self.handle
        if worker is None or handle is None:
            return
        self._world.tell("the worker of %s dies", self.name)
        worker.die()
        self.worker = self.handle = None
        version = self._version
        version.workers_lost += 1
        version.returns(handle)
        handle.lost(cause, self._ending)
        if not (self.retired or self.stopped):
            self._world.after(version.plan.restart_ns, self._start_again)

    def _start_again(self) -> None:
        if self.retired or self.stopped:
            return
        version = self._version
        if self._world.restart_fails():
            self._world.tell("%s cannot be started again", self.name)
            version.restarts_failed += 1
            model = version.model
            if not model.instances.count:
                queued = version.checks.queued()
                model.refuse(Unavailable(f"no instance of model '{model.name}' is alive: no luck"))
                waiting = [client for client in queued if client.waits]
                self._world.check(not waiting, "%s wait although no instance is left", waiting)
            self._world.after(version.plan.restart_ns, self._start_again)
            return
        self._world.tell("%s is started again", self.name)
        self.start()

    def pause(self, duration_ns: int) -> None:
        """Stop the process by a signal for some time."""
        worker, handle = self.worker, self.handle
        if worker is None or handle is None or worker.paused:
            return
        self._world.tell("%s is stopped by a signal", self.name)
        self._version.changed = True
        worker.pause()
        if self._serving and not self.retired:
            self._version.model.instances.set_apart(handle)

        def go_on() -> None:
            if worker.alive:
                self._world.tell("%s goes on", self.name)
                worker.go_on()
                if self._serving and not self.retired and worker.alive and not self.stopped:
                    self._version.model.accept()
                    self._version.model.instances.add(handle)

        self._world.after(duration_ns, go_on)

    async def retire(self, limit_s: float) -> None:
        """As `InstanceSupervisor.retire`."""
        self.retired = self._version.changed = True
        handle = self.handle
        if handle is None:
            return
        instances = self._version.model.instances
        instances.retire(handle)
        if not limit_s:
            self._ending = NotFinishedInTime(f"model instance '{self.name}'", limit_s)
            self.lose("killed by signal 9 (SIGKILL)")
        await instances.left(handle)
        await handle.drain()

    async def released(self, limit_s: float) -> None:
        """As `InstanceSupervisor.released`: there are no devices."""

    async def stop(self, *, at_once: bool = False) -> None:
        """As `InstanceSupervisor.stop`."""
        self.stopped = True
        worker, handle = self.worker, self.handle
        self.worker = self.handle = None
        if worker is not None and handle is not None:
            worker.die()
            handle.stopped()


class _BreakableInbox:
    """The inbox of a scheduler that can be made to fail."""

    def __init__(self, version: SimulatedVersion, inbox: Inbox) -> None:
        self._version = version
        self._inbox = inbox
        self.post = inbox.post  # which is the version's
        self._last: Event | None = None

    @property
    def open(self) -> bool:
        return self._inbox.open

    def _note_settled(self, event: Event) -> None:
        """The scheduler has handled `event`."""
        match event:
            case Submitted(request=request) | RequestRescheduled(request=request):
                self._version.world.client_of(request).settled = True
            case InstanceLost(returned=requests):
                for request in requests:
                    self._version.world.client_of(request).settled = True

    @types.coroutine
    def next(self, until_ns: int | None = None) -> Generator[int | None, Event, Event]:
        if self._last is not None:
            self._note_settled(self._last)
        event = self._last = yield until_ns
        if self._version.fails_next:
            self._version.fails_next = False
            raise PlannedFailure("as planned")
        return event
