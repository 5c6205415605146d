"""The dynamic batcher as a scheduler coroutine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel import errors
from kernel.loop.clock import ITERATION_END
from kernel.serving.batch import Batch
from kernel.serving.events import Cancelled, DeadlineReached, InstanceLost, NoInstanceLeft, Submitted
from schedulers.dynamic.batcher import DynamicBatcher

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet


async def dynamic(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
    """Schedule a model with `dynamic_batching`.

    Batches are dispatched at the end of an event-loop iteration, when all requests that it received are queued. This
    delays no batch: the messages of an iteration are sent together at its end anyway.
    """
    assert spec.dynamic_batching is not None
    batcher = DynamicBatcher(spec, spec.dynamic_batching)
    until_ns: int | None = None
    while True:
        event = await inbox.next(until_ns)
        until_ns = ITERATION_END
        match event:
            case Submitted(request=request):
                if not batcher.add(request):
                    _start(batcher, instances, clock)  # requests in the full queue may be ready to start
                    if not batcher.add(request):
                        request.fail(errors.QueueFull(request.id))
            case DeadlineReached():
                _start(batcher, instances, clock)
                until_ns = _wake_ns(batcher, instances)
            case Cancelled(request=request) if batcher.queue.cancel(request):
                request.fail(errors.RequestCancelled())
            case InstanceLost(returned=requests):
                batcher.put_back(requests)
            case NoInstanceLeft(error=error):
                for request in batcher.queue.take(batcher.queue.count):
                    request.fail(error)


def _start(batcher: DynamicBatcher, instances: InstanceSet, clock: Clock) -> None:
    """Fail requests whose timeout has expired, then dispatch the batches that are ready."""
    now_ns = clock.now_ns()
    if batcher.queue.next_expiry_ns is not None:
        for request in batcher.queue.expire(now_ns):
            request.fail(errors.QueueTimeout())
    while (instance := instances.soon_idle_instance()) is not None and (requests := batcher.take(now_ns)):
        instances.dispatch(instance, Batch([*requests]))


def _wake_ns(batcher: DynamicBatcher, instances: InstanceSet) -> int | None:
    """Return when to act without another event, or None. Without a free instance only expiries count."""
    expiry_ns = batcher.queue.next_expiry_ns
    start_ns = batcher.wait_until_ns() if batcher.delay_ns and instances.soon_idle_instance() is not None else None
    if expiry_ns is None or start_ns is None:
        return start_ns if expiry_ns is None else expiry_ns
    return min(expiry_ns, start_ns)
