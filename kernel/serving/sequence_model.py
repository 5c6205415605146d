"""A model version with sequences, and its instances.

A sequence stays with the version that has begun it, and at its instance, also while one of them is being retired.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kernel.errors import ModelNotReady
from kernel.observe.limited_log import LimitedLog
from kernel.serving.events import InstanceIdle, RequestRescheduled
from kernel.serving.instances import InstanceSet
from kernel.serving.live_sequences import LiveSequences
from kernel.serving.model import Model

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kernel.config.generated.model_config_pb2 import ModelConfig
    from kernel.config.spec import ModelSpec
    from kernel.errors import ServingError
    from kernel.loop.clock import Clock
    from kernel.observe.execution_reports import ExecutionTimes
    from kernel.observe.statistics import ModelStatistics
    from kernel.serving.batch import Batch
    from kernel.serving.inbox import Inbox
    from kernel.serving.instance import Instance
    from kernel.serving.instances import LiveRequests
    from kernel.serving.model import SchedulerFactory
    from kernel.serving.request import Request


class SequenceInstances(InstanceSet):
    """As `InstanceSet`. The scheduler learns of each finished batch by `finished`.

    It gets an event for it only if a request is queued or a sequence is about to end. Otherwise nothing is to be done
    before a sequence has been idle for too long.
    """

    def __init__(
        self,
        inbox: Inbox,
        live: LiveRequests,
        statistics: ModelStatistics,
        clock: Clock,
        sequences: LiveSequences,
    ) -> None:
        super().__init__(inbox, live, statistics, clock)
        self.sequences = sequences
        sequences.on_none_left = self._none_left
        #: Instances that are being retired and still have sequences.
        self._leaving: dict[Instance, asyncio.Event] = {}
        #: The batches that were finished since the scheduler took them from here, with the time.
        self.finished: list[tuple[Batch, int]] = []
        #: Set when no sequence is left; None while nobody waits.
        self._all_ended: asyncio.Event | None = None
        #: Recomputes the invariants of the scheduler; for tests.
        self.check_scheduler: Callable[[], None] = sequences.check

    # ---- for the scheduler -------------------------------------------------------------------

    @property
    def serving(self) -> Collection[Instance]:
        """The instances that take new sequences."""
        return self._serving

    @property
    def queued(self) -> int:
        """How many requests are queued."""
        return self._live.queued

    def has_room(self, instance: Instance, most: int) -> bool:
        """Whether an instance may get a batch: it is in service or leaving, and has fewer than `most` batches."""
        admission = self.admission
        if admission is not None:
            most = min(most, instance.record.concurrency)
        room = len(instance.record.batches) < most and (instance in self._serving or instance in self._leaving)
        return room and (admission is None or admission.may_start(instance))

    def dispatch(self, instance: Instance, batch: Batch) -> None:
        """Give `batch`, whose requests are queued, to `instance`, which is in service or leaving."""
        assert instance in self._serving or instance in self._leaving, f"instance {instance.name} is not in service"
        instance.record.add(batch)
        if self.admission is not None:
            self.admission.started(instance, batch)
        self._live.dispatched(batch, instance)
        instance.execute(batch)

    # ---- for supervision ---------------------------------------------------------------------

    def executed(self, instance: Instance, batch: Batch, times: ExecutionTimes) -> None:
        self.finished.append((batch, self._clock.now_ns()))
        queued = self._live.queued
        super().executed(instance, batch, times)  # posts the event if the instance is in service
        sequences = self.sequences
        if sequences.ending or sequences.iterative if not queued else instance not in self._serving:
            self._inbox.post(InstanceIdle(instance))

    def rescheduled(self, request: Request) -> None:
        """The model has given a request back, to execute it again."""
        self._live.returned([request])
        self._inbox.post(RequestRescheduled(request))

    def retire(self, instance: Instance) -> None:
        """Give the instance no new sequences. It still gets the requests of those that it has."""
        self.set_apart(instance)
        if self.sequences.on(instance):
            self._leaving[instance] = asyncio.Event()

    async def left(self, instance: Instance) -> None:
        """Wait until a retired instance has no sequence."""
        leaving = self._leaving.get(instance)
        if leaving is not None:
            await leaving.wait()

    def forget(self, instance: Instance) -> None:
        """Remove an instance that was stopped or lost."""
        super().forget(instance)
        leaving = self._leaving.pop(instance, None)
        if leaving is not None:
            leaving.set()

    async def all_ended(self) -> None:
        """Wait until no sequence is left."""
        if self.sequences:
            if self._all_ended is None:
                self._all_ended = asyncio.Event()
            await self._all_ended.wait()

    def _none_left(self, instance: Instance | None) -> None:
        """`instance` has no sequence any more; None: no sequence is left at all."""
        if instance is not None:
            leaving = self._leaving.pop(instance, None)
            if leaving is not None:
                leaving.set()
        elif self._all_ended is not None:
            self._all_ended.set()
            self._all_ended = None

    def check(self) -> None:
        super().check()
        self.check_scheduler()


#: A client may begin the same sequence again with each request.
_conflicts = LimitedLog(logging.getLogger(__name__), logging.WARNING)


def loaded_model(spec: ModelSpec, config: ModelConfig, version: int, schedule: SchedulerFactory, clock: Clock) -> Model:
    """Return a new model version of the class that its configuration needs."""
    # A scheduler of a package makes its own sequences, if it wants to have any.
    kind = Model if spec.sequence_batching is None or spec.scheduler else SequenceModel
    return kind(spec, config, version, schedule, clock)


class SequenceModel(Model):
    """A loaded model version with sequences."""

    instances: SequenceInstances

    def __init__(
        self, spec: ModelSpec, config: ModelConfig, version: int, schedule: SchedulerFactory, clock: Clock
    ) -> None:
        super().__init__(spec, config, version, schedule, clock)
        assert spec.sequence_batching is not None
        self.sequences = LiveSequences(spec.name, spec.sequence_batching)
        self.instances = SequenceInstances(self.inbox, self.live, self.statistics, clock, self.sequences)
        #: Versions that were replaced by this one, while they have sequences.
        self.former: list[SequenceModel] = []
        #: The version that has replaced this one.
        self._next: SequenceModel | None = None
        #: Only requests of live sequences are accepted.
        self._retired = False

    @property
    def live_sequences(self) -> int:
        """The number of sequences that have begun and not ended."""
        return len(self.sequences)

    @property
    def finishes_sequences(self) -> bool:
        """Whether the version was retired and still has sequences."""
        return self._retired and len(self.sequences) > 0

    @property
    def unfinished(self) -> str:
        """What `retire` waits for, for the log."""
        return f"{super().unfinished} and {len(self.sequences)} sequences"

    def follows(self, former: Model) -> None:
        """This version gets the requests of `former`, but not the requests of its live sequences."""
        if isinstance(former, SequenceModel) and former is not self:
            self.former = [each for each in (former, *former.former) if each is not self and each.sequences]
            former._next = self
            self.rule = self if self.former else None

    def continues(self, request: Request) -> bool:
        """Whether `request` belongs to a sequence that lives."""
        return not request.sequence_start and self.owner_of(request).sequences.has(request.correlation_id)

    def submit(self, request: Request) -> None:
        """Queue a checked request in the version that has its sequence. Raises `ServingError`."""
        owner = self.owner_of(request) if self.former or self._retired else self
        owner.submit_own(request)

    def submit_own(self, request: Request) -> None:
        """Queue a checked request in this version. Raises `ServingError`."""
        if self._failure is None:
            self._admit(request)
        super().submit(request)

    def choose(self, request: Request) -> SequenceModel:
        """Return the version that has the sequence of `request`. It is the `RouteRule` of this version."""
        return self.owner_of(request)

    def choose_for(self, request: Request, parent: Request) -> SequenceModel:
        """Return the version that has the sequence of `request`; `parent` does not matter."""
        return self.owner_of(request)

    def owner_of(self, request: Request) -> SequenceModel:
        """Return the version for `request`: this one, or an earlier one if that has the request's sequence."""
        correlation_id = request.correlation_id
        if self.sequences.has(correlation_id):
            return self
        if self._retired and self._next is not None:
            return self._next.owner_of(request)
        if not request.sequence_start:
            self.former = [former for former in self.former if former.sequences]
            for former in self.former:
                if former.sequences.has(correlation_id) and request.model_version in ("", former.version_text):
                    return former
        return self

    def _admit(self, request: Request) -> None:
        if self._retired and not self.sequences.has(request.correlation_id):
            raise ModelNotReady(self.name, self.version)
        if self.sequences.admit(request):
            _conflicts.log(
                f"model '{self.name}'",
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence "
                "start. Previous sequence will be terminated early.",
                request.correlation_id, self.name,
            )  # fmt: skip

    # ---- the end -----------------------------------------------------------------------------

    async def retire(self) -> None:
        """Begin no new sequence, and wait until all sequences and requests have ended."""
        self._retired = True
        while self.sequences or self.live:
            await self.drain()
            await self.instances.all_ended()

    def abandon(self, error: ServingError) -> None:
        super().abandon(error)
        self.sequences.clear()

    def _scheduler_failed(self, error: Exception) -> None:
        """End all sequences, whose queues the scheduler had, and go on as `Model` does."""
        self.sequences.clear()
        self.instances.finished.clear()
        super()._scheduler_failed(error)
