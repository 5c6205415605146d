"""One loaded version of a model: its configuration, scheduler, instances and statistics."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import DeadlineTooNear, InternalError, NoInstanceInTime, ServingError, failing_as
from kernel.loop.cancellations import Cancellations
from kernel.observe.statistics import ModelStatistics
from kernel.serving.events import Cancelled, Consumed, NoInstanceLeft, Submitted
from kernel.serving.health import ModelHealth
from kernel.serving.inbox import Inbox
from kernel.serving.instances import InstanceSet, LiveRequests
from kernel.serving.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from pathlib import Path

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.spec import ModelSpec
    from kernel.loop.cancellations import Cancellable
    from kernel.loop.clock import Clock
    from kernel.serving.events import Event
    from kernel.serving.poison import PoisonGuard
    from kernel.serving.response import Response
    from kernel.serving.route import RouteRule
    from shm.arena import Arena


logger = logging.getLogger(__name__)


class SchedulerFactory(Protocol):
    """Makes the scheduler coroutine of a model."""

    def __call__(
        self, spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock
    ) -> Coroutine[int | None, Event, None]: ...


class ModelExtension(Protocol):
    """A part of the server that stands between requests and a model, or between a model and its instances."""

    async def extend(self, model: Model, folder: Path) -> None:
        """Extend a model that is being loaded from `folder`, and has no instance yet. Raises `ServingError`."""


class Entrance(Protocol):
    """Stands before the queue of a model: a response cache."""

    def submit(self, request: Request) -> None:
        """Respond to a checked request, or queue it by `Model.submit`; own it from now on. Raises `ServingError`."""


def _nothing(*_: object) -> None:
    """What a model without extensions does."""


class _Expiration(msgspec.Struct):
    """A queued request whose timeout has passed."""

    request: Request
    model_name: str

    def cancel(self) -> None:
        """Give the request up."""
        self.request.expire(NoInstanceInTime(self.model_name, self.request.timeout_us))


class Model:
    """A loaded model version. `submit` queues requests that the kernel has checked."""

    def __init__(
        self, spec: ModelSpec, config: ModelConfig, version: int, schedule: SchedulerFactory, clock: Clock
    ) -> None:
        self.spec = spec
        self.config = config
        self.version = version
        self.version_text = str(version)
        #: Name and version, as traces have them.
        self.identity = (spec.name, version)
        self.statistics = ModelStatistics(decoupled=spec.decoupled)
        self.inbox = Inbox(clock, self._scheduler_failed, spec.name)
        self.live = LiveRequests()
        self.instances = InstanceSet(self.inbox, self.live, self.statistics, clock)
        self.health = ModelHealth()
        #: Gets requests in place of `submit`, to which it passes them on; None for a model without a cache.
        self.entrance: Entrance | None = None
        #: None for a model whose executions may not be repeated.
        self.poison: PoisonGuard | None = None
        #: Arena for large inputs of this model's requests; made when it is first needed.
        self.input_arena: Arena | None = None
        #: Stands for this load in keys of the response cache; empty without a cache.
        self.cache_salt = b""
        #: Called with a configuration that has other instances, before they are loaded. Raises `ServingError`.
        self.on_change: Callable[[ModelConfig], None] = _nothing
        #: Called when the version is closed, perhaps more than once.
        self.on_closed: Callable[[], None] = _nothing
        #: Why newer files of the model could not be loaded (poll mode); empty if these are the newest that could.
        self.reload_error = ""
        self._schedule = schedule
        self._clock = clock
        #: Chooses a version that this one has replaced, for requests of its sequences; None while there is none.
        self.rule: RouteRule | None = None
        #: The error of new requests, because no scheduler runs: it failed and the next one failed at its start, or the
        #: version was closed. Or because no instance lives, see `refuse`.
        self._failure: ServingError | None = None
        #: The failure that `accept` ends.
        self._refusal: ServingError | None = None
        #: Requests that nothing will execute, see `give_up`; made when it is first needed.
        self._given_up: Cancellations | None = None
        #: How many living requests of ensembles and callers will submit requests to this version, or have done so.
        self._pins = 0
        #: Set when no request is left; None while no `drain` waits.
        self._drained: asyncio.Event | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def in_flight(self) -> int:
        """The number of requests that were accepted and have no final response yet."""
        return len(self.live)

    @property
    def unfinished(self) -> str:
        """What `retire` waits for, for the log."""
        return f"{self.in_flight} requests"

    @property
    def live_sequences(self) -> int:
        """The number of sequences that have begun and not ended."""
        return 0

    @property
    def finishes_sequences(self) -> bool:
        """Whether the version was retired and still has sequences."""
        return False

    def follows(self, former: Model) -> None:
        """This version gets the requests that `former` has got until now."""

    def continues(self, request: Request) -> bool:
        """Whether `request` belongs to a sequence that lives."""
        return False

    @property
    def root_count(self) -> int:
        """As `in_flight`, without the requests that ensembles and models have made."""
        live = self.live
        count = sum(request.parent is None for request in live.instance_of)
        if live.at_cache:
            count += sum(not isinstance(each, Request) or each.parent is None for each in live.at_cache)
        return count

    @property
    def ready(self) -> bool:
        """Whether an instance is in service and the scheduler runs. An ensemble needs no instance."""
        return (self.instances.count > 0 or self.spec.ensemble is not None) and self._failure is None

    @property
    def trouble(self) -> str:
        """What is wrong with instances or newer files of the model, for the repository index; empty if nothing is."""
        found = [condition.text for condition in self.instances.conditions]
        if self.reload_error:
            found.append(f"newer files could not be loaded: {self.reload_error}")
        return "; ".join(found)

    def start(self) -> None:
        """Start the scheduler. Raises `ServingError` if the scheduler fails before it waits for its first event."""
        with failing_as(self._not_started, passes=ServingError):
            self.inbox.start(self._schedule(self.spec, self.inbox, self.instances, self._clock))

    def _not_started(self, error: Exception) -> ServingError:
        logger.error("the scheduler of model '%s' cannot start", self.name, exc_info=error)
        return InternalError(f"the scheduler of model '{self.name}' cannot start: {error}")

    def submit(self, request: Request) -> None:
        """Queue a checked request, and own it from now on. Raises `ServingError` if no scheduler runs.

        A request for which it raises keeps its leases.
        """
        if self._failure is not None:
            raise self._failure
        if self.poison is not None and self.poison.remembers:
            self.poison.check(request)
        if request.deadline_ns:
            self._check_deadline(request.deadline_ns)
        request.owner = self
        request.queue_start_ns = self._clock.now_ns()
        live = self.live
        live.instance_of[request] = None  # repeats `live.add`, to save a call for each request
        live.queued += 1
        self.inbox.post(Submitted(request))

    def _check_deadline(self, deadline_ns: int) -> None:
        """Raise `DeadlineTooNear` if a request could not be executed in time: it would only delay others.

        Without instances, and where requests do not wait in their order, nothing is known.
        """
        spec, count, queued = self.spec, self.instances.count, self.live.queued
        if not queued or not count or spec.sequence_batching is not None or spec.fair is not None:
            return
        batching = spec.dynamic_batching
        if batching is not None and batching.priority_levels:
            return
        rows = 1 if batching is None else max(1, spec.max_batch_size)
        # Those that wait, the batch that is executed now, and that of this request; a tenth more, because no two
        # executions take the same time.
        batches = -(-queued // rows) // count + 2
        wait_ns = batches * self.instances.mean_execution_ns() * 11 // 10
        left_ns = deadline_ns - self._clock.now_ns()
        if wait_ns > left_ns:
            self.statistics.refused += 1
            raise DeadlineTooNear(self.name, wait_ns / 1e6, max(0, left_ns) / 1e6)

    def instance_name(self, request: Request) -> str:
        """Return the name of the instance that a live request was dispatched to; empty for none."""
        instance = self.live.instance_of.get(request)
        return "" if instance is None else instance.name

    # ---- kernel.serving.request.RequestOwner -------------------------------------------------

    def responded(self, request: Request, response: Response) -> None:
        """Count a response."""
        if response.error is not None and not request.failed:
            request.failed = True
            self.statistics.record_failure(request, response.error, self._clock.now_ns())
        if self.statistics.decoupled and (response.final or request.response_count == 1):  # it looks at no others
            self.statistics.record_response(request, response, self._clock.now_ns())
        if response.final:
            live = self.live
            if live.instance_of.pop(request) is None:  # repeats `live.remove`
                live.queued -= 1
            if self._drained is not None:
                self._check_drained()

    def consumed(self, request: Request, count: int) -> None:
        """Let the instance of the request send more responses, or the scheduler if no instance has the request."""
        instance = self.live.instance_of[request]
        if instance is not None:
            instance.consumed(request, count)
        else:
            self.inbox.post(Consumed(request, count))

    def cancelled(self, request: Request) -> None:
        """Let the request's instance know, or the scheduler if the request is queued."""
        instance = self.live.instance_of[request]
        if instance is not None:
            instance.cancel(request)
        else:
            self.inbox.post(Cancelled(request))

    def left_cache(self, what: Request | Response) -> None:
        """The response cache no longer holds this request, or this response."""
        self.live.at_cache.discard(what)
        if self._drained is not None:
            self._check_drained()

    # ---- the end -----------------------------------------------------------------------------

    def refuse(self, error: ServingError) -> None:
        """Fail all queued requests with `error`, and new ones until `accept`: no instance is left, and its next start
        has failed. The one after that may come late."""
        self.inbox.post(NoInstanceLeft(error))
        if self._failure is self._refusal:
            self._failure = self._refusal = error

    def expire_queued(self) -> None:
        """Fail the queued requests whose timeout has passed. Called while no instance lives: otherwise only a queue
        policy makes timeouts count, as in Triton. Those of thousands fail in several event-loop iterations."""
        if not self._given_up:
            now_ns = self._clock.now_ns()
            queued = (request for request, instance in self.live.instance_of.items() if instance is None)
            due = [each for each in queued if 0 < each.timeout_us * 1000 <= now_ns - each.queue_start_ns]
            self.give_up(*(_Expiration(each, self.name) for each in due))

    def give_up(self, *requests: Cancellable) -> None:
        """End requests that nothing will execute: some at once, of thousands the others in later iterations."""
        if self._given_up is None:
            self._given_up = Cancellations(self._clock)
        self._given_up.add(*requests)

    def accept(self) -> None:
        """Take requests again after `refuse`: an instance lives."""
        if self._failure is self._refusal:
            self._failure = None
        self._refusal = None

    def pin(self) -> None:
        """Keep the version until `unpin`, also when it is unloaded or replaced: a living request will use it."""
        self._pins += 1

    def unpin(self) -> None:
        """End a use that `pin` began."""
        self._pins -= 1
        assert self._pins >= 0, f"version {self.version} of '{self.name}' was unpinned more often than pinned"
        if self._drained is not None:
            self._check_drained()

    def _check_drained(self) -> None:
        if self._drained is not None and not self._pins and not self.live:
            self._drained.set()
            self._drained = None

    async def drain(self) -> None:
        """Wait until every accepted request has its final response, and nobody pins the version."""
        if self.live or self._pins:
            if self._drained is None:
                self._drained = asyncio.Event()
            await self._drained.wait()

    async def retire(self) -> None:
        """Wait until the version, which gets no new requests, has nothing more to do."""
        await self.drain()

    def abandon(self, error: ServingError) -> None:
        """End the scheduler and fail all requests that have no final response with `error`, and all later ones."""
        self._failure = error
        self.inbox.close()
        for request in list(self.live.instance_of):
            request.fail(error)
        for at_cache in list(self.live.at_cache):
            if isinstance(at_cache, Request):
                at_cache.fail(error)

    def close(self, error: ServingError) -> None:
        """Abandon all requests and free the input arena."""
        self.abandon(error)
        self.on_closed()
        if self.input_arena is not None:
            self.input_arena.close()

    def _scheduler_failed(self, error: Exception) -> None:
        """Fail the requests of a scheduler that raised, and start a new scheduler."""
        failure = f"the scheduler of model '{self.name}' failed: {error}"
        for request in self.live.queued_requests():
            request.fail(InternalError(failure))
        try:
            self.start()
        except ServingError:
            logger.exception("the scheduler of model '%s' failed and cannot be started again", self.name)
            self._failure = InternalError(failure)

    def check(self) -> None:
        """Recompute the invariants of requests and batches; for tests."""
        self.instances.check()


async def all_healthy(models: Iterable[Model]) -> bool:
    """Ask each of `models` that has a health check. True if none has one."""
    checked = list(dict.fromkeys(model for model in models if model.health))
    if not checked:  # usual
        return True
    try:
        return all(await asyncio.gather(*(model.health.ready() for model in checked)))
    except ServingError:  # a step was unloaded meanwhile
        return False
