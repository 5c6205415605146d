"""The instances of a model version: their load, the dispatch of batches to them, and which of them has which request.

Pure.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Protocol

import msgspec

from kernel.errors import Unavailable
from kernel.observe.statistics import record_reported
from kernel.serving.events import BatchesRecalled, InstanceIdle, InstanceLost
from kernel.serving.next_batch_time import NextBatchTime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from kernel.loop.clock import Clock
    from kernel.observe.execution_reports import ExecutionTimes
    from kernel.observe.statistics import ModelStatistics
    from kernel.serving.batch import Batch
    from kernel.serving.inbox import Inbox
    from kernel.serving.instance import BatchRecord, Instance
    from kernel.serving.request import Request
    from kernel.serving.response import Response


class InstanceAdmission(Protocol):
    """Decides when instances of a model may start batches. Implemented by `schedulers.ratelimit`."""

    def idle_instance(self) -> Instance | None:
        """Return an idle instance in service that may start a batch now, or None: then the scheduler gets an event when
        one may."""

    def may_start(self, instance: Instance) -> bool:
        """Whether this idle instance may start a batch now. If not, the scheduler gets an event when it may."""

    def started(self, instance: Instance, batch: Batch) -> None:
        """`instance` starts `batch`, which is in its record."""

    def ended(self, instance: Instance, batch: Batch) -> None:
        """`instance` has finished `batch`: others may start batches when `pass_on` is called."""

    def added(self, instance: Instance) -> None:
        """`instance` is put in service."""

    def set_apart(self, instance: Instance) -> None:
        """`instance` gets no batch from the scheduler any more; it finishes those that it has."""

    def forgotten(self, instance: Instance) -> None:
        """`instance` is gone, with the batches that it had."""

    def pass_on(self) -> None:
        """Let instances start batches that may do so now, also instances of other models."""


class LiveRequests:
    """Requests that were accepted and have no final response yet.

    Each is at the response cache, queued, or dispatched to an instance.
    """

    def __init__(self) -> None:
        #: By request: its instance, or None while it is queued.
        self.instance_of: dict[Request, Instance | None] = {}
        #: How many requests are queued.
        self.queued = 0
        #: What the response cache has: requests that are looked up, and responses that wait until they are stored.
        self.at_cache: set[Request | Response] = set()

    def __len__(self) -> int:
        return len(self.instance_of) + len(self.at_cache)

    def add(self, request: Request) -> None:
        """Add an accepted request, which is queued."""
        self.instance_of[request] = None
        self.queued += 1

    def dispatched(self, batch: Batch, instance: Instance) -> None:
        """Note that the queued requests of `batch` were dispatched to `instance`."""
        instance_of = self.instance_of
        for request in batch.entries:
            if request is not None:
                instance_of[request] = instance
                request.dispatched = True
                self.queued -= 1

    def returned(self, requests: Iterable[Request]) -> None:
        """Note that requests of a lost instance are queued again."""
        for request in requests:
            self.instance_of[request] = None
            request.dispatched = False
            self.queued += 1

    def remove(self, request: Request) -> None:
        """Remove a request that got its final response."""
        if self.instance_of.pop(request) is None:
            self.queued -= 1

    def queued_requests(self) -> list[Request]:
        """Return the queued requests, oldest first."""
        return [request for request, instance in self.instance_of.items() if instance is None]

    def check(self, batches: Iterable[tuple[Instance, Batch]]) -> None:
        """Recompute the invariants; `batches` are the unfinished batches of all instances."""
        queued = len(self.queued_requests())
        assert self.queued == queued, f"{self.queued} requests are counted as queued, {queued} are"
        for request, instance in self.instance_of.items():
            assert not request.finished, f"request {request.id!r} is live after its final response"
            assert request.dispatched is (instance is not None), f"request {request.id!r}: dispatched is wrong"
        both = self.at_cache & self.instance_of.keys()
        assert not both, f"{len(both)} requests are at the cache and at the scheduler"
        for instance, batch in batches:
            for request in batch.requests:
                has = self.instance_of.get(request, instance)
                assert has is instance, f"request {request.id!r} is in a batch of {instance.name}, not of its instance"


#: The most work that an instance gets ahead of time, in nanoseconds of expected execution. Enough that a fast model
#: does not wait for the kernel; too little to matter when another instance becomes idle first.
PREFETCH_NS = 500_000

#: A model whose mean execution takes longer than this gets one batch ahead of time, and only if it has a single
#: instance: shortly before that is expected to end its last batch. An instance with a higher concurrency than 1 gets
#: none: it has others to execute.
FAST_EXECUTION_NS = 100_000

#: While the mean execution takes less than this, the next batch waits for the end of the last one: it grows meanwhile,
#: and a larger batch saves more than the wait costs.
PLANNED_EXECUTION_NS = 300_000

#: While the mean execution takes longer than this, no batch is dispatched ahead of time: the wait for the next batch is
#: nothing against it.
LONG_EXECUTION_NS = 100_000_000

#: The most batches that an instance of concurrency 1 has at a time.
MAX_DEPTH = 32

#: While the mean execution of a model that calls others takes longer than this, no batch is dispatched ahead of time.
FAST_CALLER_NS = 1_000_000


class Condition(msgspec.Struct, frozen=True):
    """What is wrong with an instance."""

    #: For the repository index, such as `instance 'm_0' busy for 73 s`.
    text: str
    #: Its process is stopped by a signal.
    stopped: bool = False
    #: Its worker was lost, and no other has taken its place yet. If neither holds, an execution takes long.
    lost: bool = False


class InstanceSet:
    """The instances of a model version. When a lost instance is restarted, it is added again by `add`.

    An instance is in service or set apart. The scheduler does not see an instance that is set apart: a new one that
    warms up, a retired one that finishes its batches, or one whose process is stopped.
    """

    def __init__(self, inbox: Inbox, live: LiveRequests, statistics: ModelStatistics, clock: Clock) -> None:
        self._inbox = inbox
        self._live = live
        self._statistics = statistics
        self._clock = clock
        self._serving: dict[Instance, BatchRecord] = {}
        self._apart: dict[Instance, BatchRecord] = {}
        #: What is wrong with instances; the usual one is not in it.
        self._conditions: dict[Instance, Condition] = {}
        #: The instance in service if there is exactly one, which is the usual case, and no `admission`.
        self._only: Instance | None = None
        self._execution_ns = FAST_EXECUTION_NS
        self._depth = 1
        self._max_depth = MAX_DEPTH
        #: Of a model that is not fast, the only instance gets its next batch at this time; None if not ahead of time.
        self._next_batch_ns: int | None = None
        #: Whether there may be such a time.
        self._plans_next = False
        self._next_batch_time = NextBatchTime()
        #: Whether the model calls other models.
        self._calls = False
        #: Decides when instances may start batches; None if each idle one may.
        self.admission: InstanceAdmission | None = None

    def limit(self, admission: InstanceAdmission) -> None:
        """Let `admission` decide from now on when instances start batches. Then nothing is dispatched ahead of time."""
        self.admission = admission
        for instance in self._serving:
            admission.added(instance)
        self._note_only()

    # ---- for schedulers ----------------------------------------------------------------------

    def idle_instance(self) -> Instance | None:
        """Return an instance with fewer batches than its concurrency, or None."""
        return self._with_room(1)

    def soon_idle_instance(self) -> Instance | None:
        """Return an idle instance, or one that has no batch ahead of time and may get one; or None.

        For schedulers that make batches: a fast model gets its next batch while it executes one, but not more, so that
        the other batches can grow. Other models get it when they are about to end the last one (`next_batch_ns`).
        """
        only = self._only
        if only is not None and len(only.record.batches) < only.record.concurrency:  # usual; runs for each batch
            return only
        return self._with_room(2 if self._depth > 1 else 1) or self._about_to_end()

    def idle_or_fast_instance(self, *, full: bool) -> Instance | None:
        """Return an idle instance, or one of a fast model that has no batch ahead of time; or None.

        For schedulers whose rules do not apply to dispatched batches. Several `full` batches may be ahead of time:
        together they are expected to take at most as long as one execution of a fast model.
        """
        if self._depth == 1 or self._calls:
            return self._with_room(1)
        return self._with_room(max(2, 1 + self._depth * FAST_EXECUTION_NS // PREFETCH_NS) if full else 2)

    def open_instance(self) -> Instance | None:
        """Return the instance with the fewest batches that may get another, also ahead of time, or None."""
        return self._with_room(self._depth) or self._about_to_end()

    def next_batch_ns(self) -> int | None:
        """Return when a busy instance may get a batch ahead of time. None if that is not known, or not before it is
        idle: then the scheduler gets `InstanceIdle`.

        For schedulers with queued requests to which `soon_idle_instance` or `open_instance` gives None.
        """
        only = self._only
        return self._next_batch_ns if only is not None and len(only.record.batches) == 1 else None

    def _about_to_end(self) -> Instance | None:
        next_ns = self._next_batch_ns
        if next_ns is None or self.next_batch_ns() is None or self._clock.now_ns() < next_ns:
            return None
        return self._only

    def _with_room(self, depth: int) -> Instance | None:
        only = self._only
        if only is not None:  # runs for each request
            record = only.record
            return only if len(record.batches) < record.concurrency - 1 + depth else None
        if self.admission is not None:
            return self.admission.idle_instance()
        best: Instance | None = None
        least = depth
        for instance, record in self._serving.items():
            load = len(record.batches) - record.concurrency + 1
            if load < least:
                best, least = instance, load
        return best

    def mean_execution_ns(self) -> int:
        """Return how long the last executions took, in nanoseconds: a moving average."""
        return self._execution_ns

    @property
    def serving(self) -> Collection[Instance]:
        """The instances in service."""
        return self._serving

    @property
    def count(self) -> int:
        """How many instances are in service."""
        return len(self._serving)

    def spare_counts(self) -> tuple[int, int]:
        """Return how many instances in service could execute one more batch, and how many have no batch at all."""
        records = self._serving.values()
        return sum(len(r.batches) < r.concurrency for r in records), sum(not r.batches for r in records)

    @property
    def conditions(self) -> Collection[Condition]:
        """What is wrong with instances, one entry for each of these."""
        return self._conditions.values()

    @property
    def by_instance(self) -> Mapping[Instance, Condition]:
        """The conditions of the instances with which something is wrong, also of lost ones."""
        return self._conditions

    @property
    def stopped_count(self) -> int:
        """How many instances have a process that is stopped by a signal."""
        return sum(condition.stopped for condition in self._conditions.values()) if self._conditions else 0

    @property
    def busy_count(self) -> int:
        """How many other instances execute for long."""
        if not self._conditions:
            return 0
        return sum(not (condition.stopped or condition.lost) for condition in self._conditions.values())

    @property
    def waiting(self) -> int:
        """How many requests were dispatched ahead of time and are not started."""
        return sum(len(batch.requests) for _, record in self._records() for batch in record.unstarted())

    def dispatch(self, instance: Instance, batch: Batch) -> None:
        """Give `batch`, whose requests are queued, to `instance`, which is in service."""
        assert instance in self._serving, f"instance {instance.name} is not in service"
        instance.record.add(batch)
        if self.admission is not None:
            self.admission.started(instance, batch)
        if self._plans_next and len(instance.record.batches) == 1:
            self._next_batch_ns = None
            self._begins(instance, batch, self._clock.now_ns())
        self._live.dispatched(batch, instance)
        instance.execute(batch)

    # ---- for schedulers without instances ----------------------------------------------------

    def executed_by_steps(self, request: Request, started_ns: int) -> None:
        """Account for a request that needed no instance: it got its final response, and no error."""
        self._statistics.record_composed(request, started_ns, self._clock.now_ns(), self._clock.wall_ns())

    # ---- for warm-up -------------------------------------------------------------------------

    def dispatch_apart(self, instance: Instance, batch: Batch) -> None:
        """Give `batch`, whose requests were never queued, to an instance that is set apart.

        Raises `Unavailable` if the instance was lost; then the caller still owns the requests.
        """
        if instance not in self._apart:
            raise Unavailable(f"model instance '{instance.name}' was lost")
        instance.record.add(batch)
        instance.execute(batch)

    # ---- for supervision ---------------------------------------------------------------------

    def add(self, instance: Instance) -> None:
        """Put an instance in service: a restarted one, or one that was set apart."""
        if self.admission is not None:
            self.admission.added(instance)
        was_apart = self._apart.pop(instance, None) is not None
        if not was_apart and self._statistics.workers_lost > self._statistics.workers_restarted:
            self._statistics.workers_restarted += 1
        self._serving[instance] = instance.record
        self._note_only()
        self._post_idle(instance)

    def set_apart(self, instance: Instance) -> None:
        """Hide a new instance, or one in service, from the scheduler. It finishes the batches that it has.

        `add` puts it in service again.
        """
        if self.admission is not None:
            self.admission.set_apart(instance)
        self._serving.pop(instance, None)
        self._apart[instance] = instance.record
        self._note_only()
        if self.admission is not None:
            self.admission.pass_on()

    def retire(self, instance: Instance) -> None:
        """Give an instance no new work, for good."""
        self.set_apart(instance)

    async def left(self, instance: Instance) -> None:
        """Wait until a retired instance may end, except for the batches that it has."""

    def forget(self, instance: Instance) -> None:
        """Remove an instance that was stopped."""
        if self.admission is not None:
            self.admission.forgotten(instance)
        self._serving.pop(instance, None)
        self._apart.pop(instance, None)
        self._conditions.pop(instance, None)
        self._note_only()
        if self.admission is not None:
            self.admission.pass_on()

    def set_condition(self, instance: Instance, condition: Condition | None) -> None:
        """Note what is wrong with an instance; None if nothing is wrong any more."""
        if condition is None:
            self._conditions.pop(instance, None)
        else:
            self._conditions[instance] = condition

    def _note_only(self) -> None:
        single = len(self._serving) == 1 and self.admission is None
        self._only = next(iter(self._serving)) if single else None
        self._next_batch_ns = None
        if self._calls:
            self._depth = 1

    def rescheduled(self, request: Request) -> None:
        """The model has given a request back. Raises ValueError: a model without sequences must not do so."""
        raise ValueError("a request was rescheduled, but the model has no sequences")

    def executed(self, instance: Instance, batch: Batch, times: ExecutionTimes) -> None:
        """Account for a finished batch, which is no longer in the instance's record, and post `InstanceIdle`."""
        batch.instance = instance.name
        if self.admission is not None:
            self.admission.ended(instance, batch)
        if batch.reports is None:
            self._statistics.record_execution(batch, times, self._clock.now_ns(), self._clock.wall_ns())
        else:
            now_ns, wall_ns = self._clock.now_ns(), self._clock.wall_ns()
            record_reported(self._statistics, batch, batch.reports, times, now_ns, wall_ns)
        # A moving average: one slow execution ends dispatch ahead of time, several fast ones allow it again.
        took_ns = times.compute_end_ns - times.compute_start_ns
        mean_ns = self._execution_ns = self._execution_ns + (took_ns - self._execution_ns) // 8
        if mean_ns >= FAST_EXECUTION_NS or instance.record.concurrency > 1 or self._calls:
            self._depth = 2 if self._calls and self._may_wait_behind_calls(instance) else 1
        else:
            depth = 1 + PREFETCH_NS // (mean_ns or 1)
            self._depth = depth if depth < self._max_depth else self._max_depth  # a call of min costs more
        self._next_batch_ns = None
        self._plans_next = self._depth == 1 and PLANNED_EXECUTION_NS <= mean_ns < LONG_EXECUTION_NS
        if self._plans_next:
            self._plan_next(instance, batch, times)
        if self._live.queued and instance in self._serving:
            self._inbox.post(InstanceIdle(instance))
        if self.admission is not None:
            self.admission.pass_on()

    def _plan_next(self, instance: Instance, batch: Batch, times: ExecutionTimes) -> None:
        """Learn from a finished batch of a model that is not fast, and decide when the next one is dispatched."""
        following = next(iter(instance.record.batches.values()), None)
        queued = self._live.queued > 0
        self._next_batch_time.executed(
            _rows(batch), times, followed=following is not None, queued=queued, overlaps=instance.record.overlaps
        )
        if following is not None:  # a worker may begin with it before it sends the responses
            self._begins(instance, following, times.output_start_ns)

    def _begins(self, instance: Instance, batch: Batch, begun_ns: int) -> None:
        """The instance has begun to execute its only batch."""
        if instance is self._only and instance.record.concurrency == 1 and not self._calls:
            self._next_batch_ns = self._next_batch_time.dispatch_ns(begun_ns, _rows(batch))

    def note_calls(self) -> None:
        """The model calls other models.

        A request that was dispatched ahead of time could be the very call for which its instance waits. From now on
        at most one batch is dispatched ahead of time, and only if there is a single instance. If that batch is stuck or
        cancelled, it is recalled.
        """
        self._calls = True
        self._depth = 1
        self._next_batch_ns = None

    def _may_wait_behind_calls(self, instance: Instance) -> bool:
        single = instance is self._only and instance.record.concurrency == 1
        return single and self._execution_ns < FAST_CALLER_NS

    def recalled(self, instance: Instance, returned: list[Request]) -> None:
        """`instance` gives these requests back, which it had not started."""
        self._depth = 1  # else they would go to it again at once
        self._next_batch_ns = None
        self._queue_again(BatchesRecalled(instance, returned))

    def lost(self, instance: Instance, returned: list[Request]) -> None:
        """Remove a lost instance. It has failed its started requests; `returned` are those that it had not started."""
        self.forget(instance)
        self._statistics.workers_lost += 1
        self._queue_again(InstanceLost(instance, returned))
        if self.admission is not None:
            self.admission.pass_on()

    def _queue_again(self, event: InstanceLost) -> None:
        """Queue what an instance gives back, and cancel what was cancelled there: only the instance knew that."""
        self._live.returned(event.returned)
        self._inbox.post(event)
        for request in event.returned:
            if request.cancelled and not request.finished and request.owner is not None:
                request.owner.cancelled(request)

    def _post_idle(self, instance: Instance) -> None:
        if self._live.queued:
            self._inbox.post(InstanceIdle(instance))

    # ---- invariants --------------------------------------------------------------------------

    @property
    def everywhere(self) -> Iterator[Instance]:
        """All instances: in service, and set apart."""
        return chain(self._serving, self._apart)

    def _records(self) -> Iterator[tuple[Instance, BatchRecord]]:
        return chain(self._serving.items(), self._apart.items())

    def check(self) -> None:
        """Recompute the invariants of the record of live requests and of the batches."""
        self._live.check((instance, batch) for instance, record in self._records() for batch in record.batches.values())
        for _, record in self._records():
            for number, batch in record.batches.items():
                assert batch.number == number, f"batch {batch.number} is recorded as {number}"


def _rows(batch: Batch) -> int:
    rows = 0
    for request in batch.requests:  # runs for each batch: no generator
        rows += request.batch_size or 1
    return rows
