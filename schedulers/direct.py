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


async def direct(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
    """Schedule a model that has neither dynamic nor sequence batching."""
    queue: deque[Request] = deque()
    while True:
        match await inbox.next():
            case Submitted(request=request):
                queue.append(request)
            case Cancelled(request=request) if request in queue:
                queue.remove(request)
                request.fail(errors.RequestCancelled())
            case InstanceLost(returned=requests):
                queue.extendleft(reversed(requests))
            case NoInstanceLeft(error=error):
                while queue:
                    queue.popleft().fail(error)
        while queue and (instance := instances.open_instance()) is not None:
            instances.dispatch(instance, Batch([queue.popleft()]))
