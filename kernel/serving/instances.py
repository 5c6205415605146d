"""The instances of one model version: which are idle, and handing batches to them."""

from __future__ import annotations

from collections import deque
from itertools import chain, islice
from typing import TYPE_CHECKING, Protocol

from kernel.errors import Unavailable
from kernel.serving.batch import Batch
from kernel.serving.events import InstanceIdle, Returned

if TYPE_CHECKING:
    from kernel.loop.clock import Clock
    from kernel.observe.statistics import ExecutionTimes, ModelStatistics
    from kernel.serving.inbox import Inbox
    from kernel.serving.request import Request


class Instance(Protocol):
    """One model instance that can execute. Implemented by `backends.supervision.handle.WorkerHandle`."""

    @property
    def name(self) -> str: ...

    def execute(self, batch: Batch) -> None:
        """Execute `batch` after those given before; its requests now belong to the instance.

        Never raises: what goes wrong is answered to the requests. Calls `InstanceSet.executed` at the
        end of each batch, or `InstanceSet.lost`.
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

_IDLE = InstanceIdle()


class InstanceSet:
    """Instances of a model version. A lost instance comes back by `add`, when it was restarted.

    An instance executes its batches one after the other, in the order in which it was given them, and
    answers each before it starts the next. So if it is lost, at most its first batch was started.

    One that is apart is not seen by the scheduler: a new one that warms up, or one that was taken out of
    service and finishes what it has.
    """

    def __init__(self, inbox: Inbox, statistics: ModelStatistics, clock: Clock) -> None:
        self._inbox = inbox
        self._statistics = statistics
        self._clock = clock
        #: Batches that each living instance has not finished, oldest first.
        self._batches: dict[Instance, deque[Batch]] = {}
        #: The same of those that are apart.
        self._apart: dict[Instance, deque[Batch]] = {}
        #: The living instance, and its batches, where there is exactly one, the usual case.
        self._only: Instance | None = None
        self._only_batches: deque[Batch] | None = None
        self._execution_ns = FAST_EXECUTION_NS
        self._depth = 1

    @property
    def idle(self) -> bool:
        """Whether an instance has nothing to do."""
        return self._has_room(1)

    @property
    def soon_idle(self) -> bool:
        """Whether an instance has nothing to do, or is a fast one that has a single batch.

        What a scheduler that makes batches asks: while a fast model executes one batch it is given the next,
        but no more, so that the others can grow.
        """
        if self._only_batches is not None:
            return len(self._only_batches) < (2 if self._depth > 1 else 1)
        return self._has_room(2 if self._depth > 1 else 1)

    @property
    def open(self) -> bool:
        """Whether `dispatch` can take a batch: to an idle instance, or ahead of time to a fast one."""
        if self._only_batches is not None:  # asked for each request
            return len(self._only_batches) < self._depth
        return self._has_room(self._depth)

    def _has_room(self, depth: int) -> bool:
        # A loop costs a third of a generator.
        for batches in self._batches.values():  # noqa: SIM110 - the loop is faster
            if len(batches) < depth:
                return True
        return False

    @property
    def count(self) -> int:
        """How many instances are alive and take batches."""
        return len(self._batches)

    @property
    def waiting(self) -> int:
        """How many requests instances were given ahead of time and have not started."""
        every = chain(self._batches.values(), self._apart.values())
        return sum(len(batch.requests) for batches in every for batch in islice(batches, 1, None))

    def dispatch(self, requests: list[Request]) -> None:
        """Give `requests` to the instance with the least to do; one must be `open`."""
        instance = self._only or self._least_busy()
        batch = Batch(requests)
        self._batches[instance].append(batch)
        self._statistics.pending -= len(requests)
        for request in requests:
            request.instance = instance
        instance.execute(batch)

    def _least_busy(self) -> Instance:
        return min(self._batches, key=lambda each: len(self._batches[each]))

    def dispatch_to(self, instance: Instance, requests: list[Request]) -> None:
        """Give `requests`, which never were in the queue, to an instance that is apart.

        Raises `Unavailable` where it was lost; the requests are the caller's then.
        """
        batches = self._apart.get(instance)
        if batches is None:
            raise Unavailable(f"model instance '{instance.name}' was lost")
        batch = Batch(requests)
        batches.append(batch)
        for request in requests:
            request.instance = instance
        instance.execute(batch)

    def add(self, instance: Instance) -> None:
        """An instance takes batches from now on: a restarted one, or one that was apart."""
        batches = self._apart.pop(instance, None)
        if batches is None and self._statistics.workers_lost > self._statistics.workers_restarted:
            self._statistics.workers_restarted += 1
        self._batches[instance] = deque() if batches is None else batches
        self._note_only()
        if self._statistics.pending:
            self._inbox.post(_IDLE)

    def set_apart(self, instance: Instance) -> None:
        """A new instance takes no batches yet, or one that did takes no more; it finishes what it has."""
        batches = self._batches.pop(instance, None)
        self._apart[instance] = deque() if batches is None else batches
        self._note_only()

    def forget(self, instance: Instance) -> None:
        """The instance has ended as it was told to."""
        self._batches.pop(instance, None)
        self._apart.pop(instance, None)
        self._note_only()

    def _note_only(self) -> None:
        self._only = self._only_batches = None
        if len(self._batches) == 1:
            [(self._only, self._only_batches)] = self._batches.items()

    def executed(self, instance: Instance, times: ExecutionTimes) -> None:
        """The instance has done its first batch; responses that were due have been given."""
        try:
            batch = self._batches[instance].popleft()
        except KeyError:
            batch = self._apart[instance].popleft()
        self._statistics.record_execution(batch, times, self._clock.now_ns(), self._clock.wall_ns())
        # A moving average: one slow execution ends dispatching ahead, some fast ones allow it again.
        took_ns = times.input_ns + times.infer_ns + times.output_ns
        mean_ns = self._execution_ns = self._execution_ns + (took_ns - self._execution_ns) // 8
        if mean_ns >= FAST_EXECUTION_NS:
            self._depth = 1
        else:
            depth = 1 + PREFETCH_NS // (mean_ns or 1)
            self._depth = depth if depth < MAX_DEPTH else MAX_DEPTH  # a call of min costs more
        if self._statistics.pending:
            self._inbox.post(_IDLE)

    def lost(self, instance: Instance, unstarted: list[Request]) -> None:
        """The instance is gone. It has failed the requests that it was executing; `unstarted` are those
        that it had been given ahead of time, and they go back to the scheduler."""
        self.forget(instance)
        self._statistics.workers_lost += 1
        if unstarted:
            self._statistics.pending += len(unstarted)
            for request in unstarted:
                request.instance = None
            self._inbox.post(Returned(unstarted))
