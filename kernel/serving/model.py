"""One loaded version of a model: its configuration, scheduler, instances and statistics."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from kernel.errors import InternalError
from kernel.observe.statistics import ModelStatistics
from kernel.serving.events import Cancelled, NoInstanceLeft, Submitted
from kernel.serving.inbox import Inbox
from kernel.serving.instances import InstanceSet
from kernel.serving.live_requests import LiveRequests

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.spec import ModelSpec
    from kernel.errors import ServingError
    from kernel.loop.clock import Clock
    from kernel.serving.events import Event
    from kernel.serving.request import Request
    from kernel.serving.response import Response
    from shm.arena import Arena


logger = logging.getLogger(__name__)


class SchedulerFactory(Protocol):
    """Makes the scheduler coroutine of a model."""

    def __call__(
        self, spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock
    ) -> Coroutine[int | None, Event, None]: ...


class Model:
    """A model version that is loaded. Requests enter by `submit` once the kernel has checked them."""

    def __init__(
        self, spec: ModelSpec, config: ModelConfig, version: int, schedule: SchedulerFactory, clock: Clock
    ) -> None:
        self.spec = spec
        self.config = config
        self.version = version
        self.version_text = str(version)
        self.statistics = ModelStatistics(decoupled=spec.decoupled)
        self.inbox = Inbox(clock, self._scheduler_failed)
        self.live = LiveRequests()
        self.instances = InstanceSet(self.inbox, self.live, self.statistics, clock)
        #: Holds large inputs of this model's requests; made when the first one comes.
        self.input_arena: Arena | None = None
        self._schedule = schedule
        self._clock = clock
        #: Why no scheduler runs: it failed, and so did the next as soon as it was started.
        self._failure: str | None = None
        #: Set when no request is left; None while nobody waits for that.
        self._drained: asyncio.Event | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and have no final response yet."""
        return len(self.live)

    @property
    def ready(self) -> bool:
        """Whether an instance is alive to execute requests, and a scheduler to give them to it."""
        return self.instances.count > 0 and self._failure is None

    def start(self) -> None:
        """Start the scheduler. Raises what that raises before it waits for its first request."""
        self.inbox.start(self._schedule(self.spec, self.inbox, self.instances, self._clock))

    def submit(self, request: Request) -> None:
        """Queue a checked request, which is the model's from now on. Raises `InternalError` where no scheduler is."""
        if self._failure is not None:
            request.release_leases()
            raise InternalError(self._failure)
        request.owner = self
        request.queue_start_ns = self._clock.now_ns()
        live = self.live
        live.instance_of[request] = None  # as `live.add`, of which every request would be a call
        live.queued += 1
        self.inbox.post(Submitted(request))

    # ---- kernel.serving.request.RequestOwner -------------------------------------------------

    def responded(self, request: Request, response: Response) -> None:
        """Account for a response."""
        if response.error is not None and not request.failed:
            request.failed = True
            self.statistics.record_failure(request, response.error, self._clock.now_ns())
        if self.statistics.decoupled:
            self.statistics.record_response(request, response, self._clock.now_ns())
        if response.final:
            live = self.live
            if live.instance_of.pop(request) is None:  # as `live.remove`
                live.queued -= 1
            if self._drained is not None and not live.instance_of:
                self._drained.set()
                self._drained = None

    def consumed(self, request: Request, count: int) -> None:
        """Let the instance that executes the request send more."""
        instance = self.live.instance_of[request]
        if instance is not None:
            instance.consumed(request, count)

    def cancelled(self, request: Request) -> None:
        """Drop the request from the queue, or let the instance that executes it know."""
        instance = self.live.instance_of[request]
        if instance is not None:
            instance.cancel(request)
        else:
            self.inbox.post(Cancelled(request))

    # ---- the end -----------------------------------------------------------------------------

    def fail_queued(self, error: ServingError) -> None:
        """No instance is left and none will come soon: what waits for one is answered with `error`."""
        self.inbox.post(NoInstanceLeft(error))

    async def drain(self) -> None:
        """Wait until every accepted request has its final response."""
        if self.live:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    def abandon(self, error: ServingError) -> None:
        """End the scheduler and answer whatever is still unanswered with `error`."""
        self.inbox.close()
        for request in list(self.live.instance_of):
            request.fail(error)

    def close(self, error: ServingError) -> None:
        """Abandon what is unanswered and give the model's memory back."""
        self.abandon(error)
        if self.input_arena is not None:
            self.input_arena.close()

    def _scheduler_failed(self, error: Exception) -> None:
        """A scheduler raised: requests that it held are answered, and a new one starts."""
        failure = f"the scheduler of model '{self.name}' failed: {error}"
        for request in self.live.queued_requests():
            request.fail(InternalError(failure))
        try:
            self.start()
        except Exception:
            logger.exception("the scheduler of model '%s' failed and cannot be started again", self.name)
            self._failure = failure

    def check(self) -> None:
        """Recompute the invariants of requests and batches; for tests."""
        self.instances.check()
