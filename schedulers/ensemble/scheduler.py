"""The scheduler coroutine of ensembles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.events import Cancelled, ChildResponded, Consumed, DeadlineReached, Submitted
from schedulers.ensemble.driver import EnsembleDriver

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from schedulers.ensemble.driver import ModelCaller


async def ensemble(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock, *, caller: ModelCaller) -> None:
    """Schedule an ensemble: its steps are requests to other models, submitted through `caller`."""
    driver = EnsembleDriver(spec, inbox, instances, clock, caller)
    try:
        until_ns: int | None = None
        while True:
            match await inbox.next(until_ns):
                case ChildResponded(child=child, response=response):
                    driver.responded(child, response)
                case Submitted(request=request):
                    driver.begin(request)
                case Consumed(request=request, count=count):
                    driver.consumed(request, count)
                case Cancelled(request=request):
                    driver.cancelled(request)
                case DeadlineReached():
                    driver.continue_overdue()
            if driver.has_deadlines:
                until_ns = driver.until_ns
    finally:
        driver.close()
