"""The dynamic batcher as a scheduler coroutine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel import errors
from kernel.loop.clock import ITERATION_END
from kernel.serving.batch import Batch
from kernel.serving.events import (
    FAILED_AT_ONCE,
    Cancelled,
    DeadlineReached,
    InstanceIdle,
    InstanceLost,
    NoInstanceLeft,
    Submitted,
)
from schedulers.batching_rules import batching_rule
from schedulers.dynamic.batcher import DynamicBatcher
from schedulers.quota import ClientQuotas
from schedulers.response_order import ResponseOrder
from schedulers.start_hold import hold_until_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.inbox import Inbox
    from kernel.serving.instance import Instance
    from kernel.serving.instances import InstanceSet
    from kernel.serving.request import Request


async def dynamic(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
    """Schedule a model with `dynamic_batching`, or one without whose clients get shares (`naiad.fair_by`).

    Batches are dispatched at the end of an event-loop iteration, when all requests that it received are queued. This
    delays no batch: the messages of an iteration are sent together at its end anyway.
    """
    settings = spec.dynamic_batching
    batcher = DynamicBatcher(spec, settings, batching_rule(spec), hold_until_count(), instances.mean_execution_ns)
    dispatcher = _Dispatcher(spec, batcher, instances, clock)
    quotas = ClientQuotas(spec.fair) if spec.fair is not None and spec.fair.has_quotas else None
    until_ns: int | None = None
    #: With what queued requests fail, because no instance is left.
    failure: errors.ServingError | None = None
    try:
        while True:
            event = await inbox.next(until_ns)
            until_ns = ITERATION_END
            match event:
                case Submitted(request=request):
                    if quotas is not None and request.parent is None and (quota := quotas.admit(request)):
                        request.fail(errors.QuotaExceeded(request.id, quota))
                    elif not batcher.add(request):
                        dispatcher.start()  # requests in the full queue may be ready to start
                        if not batcher.add(request):
                            request.fail(errors.QueueFull(request.id))
                case DeadlineReached() if failure is not None:
                    failure = _fail_some(batcher, failure)
                case DeadlineReached():
                    dispatcher.start()
                    until_ns = dispatcher.wake_ns() if batcher.queue.count else None
                case Cancelled(request=request) if batcher.queue.cancel(request):
                    request.fail(errors.RequestCancelled())
                case InstanceLost(returned=requests):
                    batcher.put_back(requests)
                case NoInstanceLeft(error=error):
                    failure = _fail_some(batcher, error)
                case InstanceIdle():
                    failure = None
    finally:
        batcher.close()


def _fail_some(batcher: DynamicBatcher, error: errors.ServingError) -> errors.ServingError | None:
    """Fail the first of the queued requests. Returns `error` if others are left, else None."""
    for request in batcher.queue.take(FAILED_AT_ONCE):
        request.fail(error)
    return error if batcher.queue.count else None


class _Dispatcher:
    """Gives the batches that are ready to instances."""

    def __init__(self, spec: ModelSpec, batcher: DynamicBatcher, instances: InstanceSet, clock: Clock) -> None:
        settings = spec.dynamic_batching
        self._batcher = batcher
        self._queue = batcher.queue
        self._clock = clock
        self._dispatch = instances.dispatch
        self._next_batch_ns = instances.next_batch_ns
        # What was dispatched ahead of time waits outside of the queue, where neither its limits and timeouts nor
        # requests with a higher priority, or of other clients, reach it.
        self._waits_for_idle = waits_for_idle = spec.fair is not None or (
            settings is not None and settings.limits_waiting
        )
        self._free_instance: Callable[[], Instance | None] = (
            instances.idle_instance if waits_for_idle else instances.soon_idle_instance
        )
        ordered = settings is not None and settings.preserve_ordering
        self._order: ResponseOrder | None = ResponseOrder() if ordered else None

    def start(self) -> None:
        """Fail requests whose timeout has expired, then dispatch the batches that are ready."""
        now_ns = self._clock.now_ns()
        if self._queue.next_expiry_ns is not None:
            for request in self._queue.expire(now_ns):
                request.fail(errors.QueueTimeout())
            if self._queue.next_expiry_ns is not None and self._queue.next_expiry_ns <= now_ns:
                return  # more have expired than may fail in one iteration: none of them is executed
        batcher, queue, order = self._batcher, self._queue, self._order
        while queue.count and (instance := self._free_instance()) is not None:
            requests = batcher.take(now_ns)
            if not requests:
                return
            if order is not None:
                order.reserve(requests)
            entries: list[Request | None] = [*requests]
            self._dispatch(instance, Batch(entries, closed_by=batcher.closed_by))

    def wake_ns(self) -> int | None:
        """Return when to act without another event while requests are queued, or None. Without a free instance only
        expiries count, and when a busy one may get a batch ahead of time."""
        batcher = self._batcher
        expiry_ns = self._queue.next_expiry_ns
        if expiry_ns is not None and expiry_ns <= self._clock.now_ns():
            return ITERATION_END
        start_ns = None
        if self._free_instance() is None:
            start_ns = None if self._waits_for_idle else self._next_batch_ns()
        elif batcher.delay_ns:
            start_ns = batcher.wait_until_ns()
        if expiry_ns is None or start_ns is None:
            return start_ns if expiry_ns is None else expiry_ns
        return min(expiry_ns, start_ns)
