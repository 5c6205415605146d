"""The scheduler of models with the dynamic batcher, and the order of their responses (`preserve_ordering`).

With `preserve_ordering` responses have the order of the requests, however many instances execute them. A request gets
its place when it is dispatched. Responses that come before responses to earlier requests are kept, with their leases,
until the earlier ones were passed on. A request that is never dispatched has no place: its error is sent at once.

A request that a model has made, by a call or as a step of an ensemble that it has called, has no place either: its
response is sent at once. Otherwise an earlier request whose model waits for that call would wait for itself. So no
execution ever waits for a response that is kept.
"""

from __future__ import annotations

from collections import deque
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
from kernel.serving.model import Model
from schedulers.batching_rules import batching_rule
from schedulers.dynamic_batcher import DynamicBatcher
from schedulers.queue import ClientQuotas
from schedulers.start_hold import hold_until_count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.inbox import Inbox
    from kernel.serving.instance import Instance
    from kernel.serving.instances import InstanceSet
    from kernel.serving.request import Request
    from kernel.serving.response import Response, ResponseReceiver


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
        self._full_rows = max(1, spec.max_batch_size)
        self._idle_instance = instances.idle_instance
        self._idle_or_fast_instance = instances.idle_or_fast_instance
        # What was dispatched ahead of time waits outside of the queue, where neither its limits and timeouts nor
        # requests with a higher priority, or of other clients, reach it.
        self._is_fair = spec.fair is not None
        self._has_rules = rules = self._is_fair or (settings is not None and settings.limits_waiting)
        # A full batch need not wait to grow: a fast instance gets several of them ahead of time.
        self._instance_for_full = self._instance_with_rules if rules else instances.open_instance
        self._instance_for_others = self._instance_with_rules if rules else instances.soon_idle_instance
        ordered = settings is not None and settings.preserve_ordering
        self._order: ResponseOrder | None = ResponseOrder() if ordered else None

    def _instance_with_rules(self) -> Instance | None:
        """Return an instance for a request whose wait has rules: an idle one, or a fast one that is about to be idle.

        Requests that can expire, or whose clients have shares, wait in the queue to the last.
        """
        queue = self._queue
        if self._is_fair or queue.next_expiry_ns is not None:
            return self._idle_instance()
        return self._idle_or_fast_instance(full=queue.count >= self._full_rows)

    def start(self) -> None:
        """Fail requests whose timeout has expired, then dispatch the batches that are ready."""
        now_ns = self._clock.now_ns()
        if self._queue.next_expiry_ns is not None:
            for request in self._queue.expire(now_ns):
                request.fail(errors.QueueTimeout())
            if self._queue.next_expiry_ns is not None and self._queue.next_expiry_ns <= now_ns:
                return  # more have expired than may fail in one iteration: none of them is executed
        batcher, queue, order = self._batcher, self._queue, self._order
        while queue.count:
            find = self._instance_for_full if queue.count >= self._full_rows else self._instance_for_others
            if (instance := find()) is None:
                return
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
        find = self._instance_for_full if self._queue.count >= self._full_rows else self._instance_for_others
        if find() is None:
            start_ns = None if self._has_rules else self._next_batch_ns()
        elif batcher.delay_ns:
            start_ns = batcher.wait_until_ns()
        if expiry_ns is None or start_ns is None:
            return start_ns if expiry_ns is None else expiry_ns
        return min(expiry_ns, start_ns)


class ResponseOrder:
    """The places of dispatched requests whose final response was not passed on yet."""

    def __init__(self) -> None:
        self._places: deque[_Place] = deque()

    def __len__(self) -> int:
        return len(self._places)

    def reserve(self, requests: Iterable[Request]) -> None:
        """Give each request the next place, unless a model has made it.

        One that was dispatched before keeps its place.
        """
        for request in requests:
            if not isinstance(request.passage, _Place) and (request.parent is None or not _is_for_a_call(request)):
                place = request.passage = _Place(self, request.passage or request.sink)
                self._places.append(place)

    def is_first(self, place: _Place) -> bool:
        return self._places[0] is place

    def first_ended(self) -> None:
        """The first place got its final response: pass on what was kept back for the next ones."""
        self._places.popleft()
        while self._places and self._places[0].pass_on():
            self._places.popleft()


def _is_for_a_call(request: Request) -> bool:
    """Whether a model has made the request, or called the ensemble that has made it."""
    while (parent := request.parent) is not None:
        if not isinstance(parent.owner, Model) or parent.owner.spec.ensemble is None:
            return True
        request = parent
    return False


class _Place:
    """What the responses of a request pass that has a place. Implements `ResponseReceiver`."""

    __slots__ = ("_inner", "_kept", "_order")

    def __init__(self, order: ResponseOrder, inner: ResponseReceiver) -> None:
        self._order = order
        self._inner = inner
        self._kept: list[Response] = []

    def send(self, response: Response) -> None:
        if not self._order.is_first(self):
            self._kept.append(response)
            return
        self._inner.send(response)
        if response.final:
            self._order.first_ended()

    def pass_on(self) -> bool:
        """Send what was kept back; returns whether the final response was among it."""
        kept, self._kept = self._kept, []
        for response in kept:
            self._inner.send(response)
        return bool(kept) and kept[-1].final
