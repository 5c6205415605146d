"""The scheduler without batching: each request goes to the least busy instance, in the order of arrival."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kernel import errors
from kernel.serving.batch import Batch
from kernel.serving.events import Cancelled, InstanceLost, NoInstanceLeft, Submitted

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.request import Request

#: Cancelled requests that stay in the queue of any length.
_KEPT = 64


async def direct(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
    """Schedule a model that has neither dynamic nor sequence batching."""
    queue: deque[Request] = deque()
    #: How many entries of the queue were cancelled, and have their final response. To search them would take long: a
    #: client that disconnects cancels thousands.
    cancelled = 0
    while True:
        # When a busy instance may get a request ahead of time, without another event.
        match await inbox.next(instances.next_batch_ns() if queue else None):
            case Submitted(request=request):
                queue.append(request)
            case Cancelled(request=request) if not (request.dispatched or request.finished):
                cancelled += 1
                request.fail(errors.RequestCancelled())
                if cancelled > len(queue) // 2 + _KEPT:
                    queue = deque(each for each in queue if not each.finished)
                    cancelled = 0
            case InstanceLost(returned=requests):
                queue.extendleft(reversed(requests))
            case NoInstanceLeft(error=error):
                failed, queue, cancelled = queue, deque(), 0
                for request in failed:
                    if not request.finished:
                        request.fail(error)
        while queue and (instance := instances.open_instance()) is not None:
            request = queue.popleft()
            if request.finished:
                cancelled -= 1
            else:
                instances.dispatch(instance, Batch([request]))
