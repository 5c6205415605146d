"""The instances of one model version: which are idle, and handing batches to them."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol

from kernel.errors import Unavailable
from kernel.serving.events import InstanceIdle, InstanceLost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernel.loop.clock import Clock
    from kernel.observe.statistics import ExecutionTimes, ModelStatistics
    from kernel.serving.batch import Batch
    from kernel.serving.inbox import Inbox
    from kernel.serving.live_requests import LiveRequests
    from kernel.serving.request import Request


class Instance(Protocol):
    """One model instance that can execute. Implemented by `backends.supervision.handle.WorkerHandle`."""

    @property
    def name(self) -> str: ...

    @property
    def record(self) -> BatchRecord:
        """The batches that the instance has. `InstanceSet` adds to it; the instance removes what it has finished."""

    def execute(self, batch: Batch) -> None:
        """Execute `batch` after those given before; its requests now belong to the instance.

        Never raises: what goes wrong becomes a response to the requests. Calls `InstanceSet.executed` at the end of
        each batch, or `InstanceSet.lost`.
        """

    def cancel(self, request: Request) -> None:
        """Tell the model that the client of an executing request has gone."""

    def consumed(self, request: Request, count: int) -> None:
        """Let the model send `count` more responses of a request that it streams."""


#: An instance may be given so much work ahead of time, as far as past executions tell: enough that a
#: fast model never waits for the kernel, too little to matter when another instance becomes idle first.
PREFETCH_NS = 500_000

#: Executions longer than this are never dispatched ahead of time.
FAST_EXECUTION_NS = 100_000

MAX_DEPTH = 32


class BatchRecord:
    """The one record of the batches that an instance was given and has not finished.

    With a concurrency of 1 an instance executes in the order of dispatch, and has started its first batch. With more
    it says of each batch when it starts.
    """

    __slots__ = ("_last_number", "_started", "batches", "concurrency")

    def __init__(self, concurrency: int = 1) -> None:
        #: How many batches the instance executes at the same time.
        self.concurrency = concurrency
        #: By `Batch.number`, in the order of dispatch.
        self.batches: dict[int, Batch] = {}
        self._started: set[int] = set()
        self._last_number = 0

    def add(self, batch: Batch) -> None:
        """A batch was dispatched; it gets its number."""
        self._last_number = batch.number = self._last_number + 1
        self.batches[batch.number] = batch

    def started(self, number: int) -> None:
        """The instance has begun to execute a batch. Raises KeyError for one that it does not have, or without
        concurrency, where nothing is said of that."""
        if self.concurrency == 1:
            raise KeyError(number)
        self._started.add(self.batches[number].number)

    def executed(self, number: int) -> Batch:
        """Remove and return a batch that the instance has finished. Raises KeyError for one that is not started."""
        if self.concurrency == 1:
            if number != next(iter(self.batches), None):
                raise KeyError(number)
        else:
            self._started.remove(number)
        return self.batches.pop(number)

    def unstarted(self) -> list[Batch]:
        """Return the batches that the instance has certainly not started, in the order of dispatch."""
        if self.concurrency == 1:
            return list(islice(self.batches.values(), 1, None))
        return [batch for number, batch in self.batches.items() if number not in self._started]


class InstanceSet:
    """Instances of a model version. A lost instance comes back by `add`, when it was restarted.

    One that is apart is not seen by the scheduler: a new one that warms up, or one that was taken out of service and
    finishes what it has.
    """

    def __init__(self, inbox: Inbox, live: LiveRequests, statistics: ModelStatistics, clock: Clock) -> None:
        self._inbox = inbox
        self._live = live
        self._statistics = statistics
        self._clock = clock
        self._serving: dict[Instance, BatchRecord] = {}
        self._apart: dict[Instance, BatchRecord] = {}
        #: The living instance where there is exactly one, the usual case.
        self._only: Instance | None = None
        self._execution_ns = FAST_EXECUTION_NS
        self._depth = 1

    # ---- for schedulers ----------------------------------------------------------------------

    def idle_instance(self) -> Instance | None:
        """Return an instance that has nothing to do, or fewer batches than it executes at the same time."""
        return self._with_room(1)

    def soon_idle_instance(self) -> Instance | None:
        """Return an instance that has nothing to do, or a fast one that has a single batch.

        For schedulers that make batches: while a fast model executes one batch it is given the next, but no more, so
        that the others can grow.
        """
        return self._with_room(2 if self._depth > 1 else 1)

    def open_instance(self) -> Instance | None:
        """Return the instance with the least to do that can take a batch: an idle one, or ahead of time a fast one."""
        return self._with_room(self._depth)

    def _with_room(self, depth: int) -> Instance | None:
        only = self._only
        if only is not None:  # asked for each request
            record = only.record
            return only if len(record.batches) < record.concurrency - 1 + depth else None
        best: Instance | None = None
        least = depth
        for instance, record in self._serving.items():
            load = len(record.batches) - record.concurrency + 1
            if load < least:
                best, least = instance, load
        return best

    @property
    def count(self) -> int:
        """How many instances are alive and take batches."""
        return len(self._serving)

    @property
    def waiting(self) -> int:
        """How many requests instances were given ahead of time and have not started."""
        return sum(len(batch.requests) for _, record in self._records() for batch in record.unstarted())

    def dispatch(self, instance: Instance, batch: Batch) -> None:
        """Give `batch`, whose requests were queued, to `instance`, which takes batches."""
        assert instance in self._serving, f"instance {instance.name} takes no batches"
        instance.record.add(batch)
        self._live.dispatched(batch, instance)
        instance.execute(batch)

    # ---- for warm-up -------------------------------------------------------------------------

    def dispatch_apart(self, instance: Instance, batch: Batch) -> None:
        """Give `batch`, whose requests never were in the queue, to an instance that is apart.

        Raises `Unavailable` where it was lost; the requests are the caller's then.
        """
        if instance not in self._apart:
            raise Unavailable(f"model instance '{instance.name}' was lost")
        instance.record.add(batch)
        instance.execute(batch)

    # ---- for supervision ---------------------------------------------------------------------

    def add(self, instance: Instance) -> None:
        """An instance takes batches from now on: a restarted one, or one that was apart."""
        was_apart = self._apart.pop(instance, None) is not None
        if not was_apart and self._statistics.workers_lost > self._statistics.workers_restarted:
            self._statistics.workers_restarted += 1
        self._serving[instance] = instance.record
        self._note_only()
        self._post_idle(instance)

    def set_apart(self, instance: Instance) -> None:
        """A new instance takes no batches yet, or one that did takes no more; it finishes what it has."""
        self._serving.pop(instance, None)
        self._apart[instance] = instance.record
        self._note_only()

    def forget(self, instance: Instance) -> None:
        """The instance has ended as it was asked to."""
        self._serving.pop(instance, None)
        self._apart.pop(instance, None)
        self._note_only()

    def _note_only(self) -> None:
        self._only = next(iter(self._serving)) if len(self._serving) == 1 else None

    def executed(self, instance: Instance, batch: Batch, times: ExecutionTimes) -> None:
        """The instance has finished `batch`, which was taken from its record; due responses have been given."""
        self._statistics.record_execution(batch, times, self._clock.now_ns(), self._clock.wall_ns())
        # A moving average: one slow execution ends dispatching ahead, some fast ones allow it again.
        took_ns = times.compute_end_ns - times.compute_start_ns
        mean_ns = self._execution_ns = self._execution_ns + (took_ns - self._execution_ns) // 8
        if mean_ns >= FAST_EXECUTION_NS:
            self._depth = 1
        else:
            depth = 1 + PREFETCH_NS // (mean_ns or 1)
            self._depth = depth if depth < MAX_DEPTH else MAX_DEPTH  # a call of min costs more
        if self._live.queued and instance in self._serving:
            self._inbox.post(InstanceIdle(instance))

    def lost(self, instance: Instance, returned: list[Request]) -> None:
        """The instance is gone. It has failed the requests that it was executing; it had not started `returned`."""
        self.forget(instance)
        self._statistics.workers_lost += 1
        self._live.returned(returned)
        self._inbox.post(InstanceLost(instance, returned))

    def _post_idle(self, instance: Instance) -> None:
        if self._live.queued:
            self._inbox.post(InstanceIdle(instance))

    # ---- invariants --------------------------------------------------------------------------

    def _records(self) -> Iterator[tuple[Instance, BatchRecord]]:
        return chain(self._serving.items(), self._apart.items())

    def check(self) -> None:
        """Recompute the invariants of the record of live requests and of the batches."""
        self._live.check((instance, batch) for instance, record in self._records() for batch in record.batches.values())
        for _, record in self._records():
            for number, batch in record.batches.items():
                assert batch.number == number, f"batch {batch.number} is recorded as {number}"
