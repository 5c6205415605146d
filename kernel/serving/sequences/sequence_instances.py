"""The instances of a model with sequences. A sequence stays at its instance, also while that is being retired."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kernel.serving.events import InstanceIdle, RequestRescheduled
from kernel.serving.instances import InstanceSet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kernel.loop.clock import Clock
    from kernel.observe.reporting.execution_times import ExecutionTimes
    from kernel.observe.statistics import ModelStatistics
    from kernel.serving.batch import Batch
    from kernel.serving.inbox import Inbox
    from kernel.serving.instance import Instance
    from kernel.serving.live_requests import LiveRequests
    from kernel.serving.request import Request
    from kernel.serving.sequences.live_sequences import LiveSequences


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
