"""The scheduler without batching: each request goes to the least busy instance, in the order of arrival."""

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

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.request import Request

#: How many entries of the queue are looked at for each request that is cancelled. Two entries would find as many
#: cancelled ones as there come; with four, they are at most half as many as the others.
_SWEPT_AT_ONCE = 4


async def direct(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
    """Schedule a model that has neither dynamic nor sequence batching."""
    queue: deque[Request] = deque()
    #: The requests before those of `queue`, empty if `queue` is. Entries that were cancelled have been removed from it.
    #: A client that disconnects cancels thousands: to search each would take long, and to look at all entries at once.
    swept: deque[Request] = deque()
    #: With what queued requests fail, because no instance is left.
    failure: errors.ServingError | None = None
    while True:
        # When a busy instance may get a request ahead of time, without another event.
        until_ns = instances.next_batch_ns() if queue else None
        match await inbox.next(until_ns if failure is None else ITERATION_END):
            case Submitted(request=request):
                queue.append(request)
            case Cancelled(request=request) if not (request.dispatched or request.finished):
                request.fail(errors.RequestCancelled())
                for _ in range(min(_SWEPT_AT_ONCE, len(queue))):
                    first = queue.popleft()
                    if not first.finished:
                        swept.append(first)
                if not queue:
                    queue, swept = swept, queue
            case InstanceLost(returned=requests):
                (swept or queue).extendleft(reversed(requests))
            case NoInstanceLeft(error=error):
                failure = _fail_some(queue, swept, error)
            case DeadlineReached() if failure is not None:
                failure = _fail_some(queue, swept, failure)
            case InstanceIdle():
                failure = None
        while queue and (instance := instances.open_instance()) is not None:
            request = (swept or queue).popleft()
            if not request.finished:
                instances.dispatch(instance, Batch([request]))


def _fail_some(queue: deque[Request], swept: deque[Request], error: errors.ServingError) -> errors.ServingError | None:
    """Fail the first of the queued requests. Returns `error` if others are left, else None."""
    for _ in range(FAILED_AT_ONCE):
        if not queue:
            return None
        request = (swept or queue).popleft()
        if not request.finished:
            request.fail(error)
    return error if queue else None
