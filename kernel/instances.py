"""The instances of one model version: which are idle, and handing batches to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kernel.batch import Batch
from kernel.events import InstanceIdle

if TYPE_CHECKING:
    from kernel.clock import Clock
    from kernel.inbox import Inbox
    from kernel.observe.statistics import ExecutionTimes, ModelStatistics
    from kernel.request import Request


class Instance(Protocol):
    """One model instance that can execute. Implemented by `backends.handle.WorkerHandle`."""

    @property
    def name(self) -> str: ...

    def execute(self, batch: Batch) -> None:
        """Execute `batch`, whose requests now belong to the instance. Never raises: what goes wrong is
        answered to the requests. Calls `InstanceSet.executed` or `InstanceSet.lost` at the end."""

    def cancel(self, request: Request) -> None:
        """Tell the model that the client of an executing request has gone."""

    def consumed(self, request: Request, count: int) -> None:
        """Let the model send `count` more responses of a request that it streams."""


class InstanceSet:
    """Instances of a model version. A lost instance comes back by `add`, when it was restarted."""

    def __init__(self, inbox: Inbox, statistics: ModelStatistics, clock: Clock) -> None:
        self._inbox = inbox
        self._statistics = statistics
        self._clock = clock
        self._idle: list[Instance] = []
        self._busy: dict[Instance, Batch] = {}

    @property
    def idle(self) -> bool:
        """Whether `dispatch` can take a batch."""
        return bool(self._idle)

    @property
    def count(self) -> int:
        """How many instances are alive."""
        return len(self._idle) + len(self._busy)

    def dispatch(self, requests: list[Request]) -> None:
        """Give `requests` to an idle instance; there must be one.

        The instance that was idle for the shortest time is taken: its caches are the warmest.
        """
        instance = self._idle.pop()
        batch = Batch(requests, self._clock.now_ns())
        self._busy[instance] = batch
        self._statistics.pending -= len(requests)
        for request in requests:
            request.instance = instance
        instance.execute(batch)

    def add(self, instance: Instance) -> None:
        """A new or restarted instance is ready."""
        self._idle.append(instance)
        self._inbox.post(InstanceIdle())

    def executed(self, instance: Instance, times: ExecutionTimes) -> None:
        """The instance has done its batch; responses that were due have been given."""
        batch = self._busy.pop(instance)
        self._statistics.record_execution(batch, times, self._clock.now_ns(), self._clock.wall_ms())
        self._idle.append(instance)
        self._inbox.post(InstanceIdle())

    def lost(self, instance: Instance) -> None:
        """The instance is gone; it has failed the requests that it was executing."""
        self._busy.pop(instance, None)
        if instance in self._idle:
            self._idle.remove(instance)
        self._statistics.workers_lost += 1
