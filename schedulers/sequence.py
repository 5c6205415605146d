"""The sequence batcher as a scheduler coroutine."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kernel import errors
from kernel.loop.clock import ITERATION_END
from kernel.serving.events import (
    FAILED_AT_ONCE,
    Cancelled,
    DeadlineReached,
    InstanceIdle,
    InstanceLost,
    NoInstanceLeft,
    RequestRescheduled,
    Submitted,
)
from kernel.serving.sequence_model import SequenceInstances
from schedulers.sequence_batcher import SequenceBatcher
from schedulers.start_hold import SequenceHold

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec
    from kernel.loop.clock import Clock
    from kernel.serving.inbox import Inbox
    from kernel.serving.instances import InstanceSet
    from kernel.serving.live_sequences import Sequence
    from kernel.serving.request import Request


async def sequence(spec: ModelSpec, inbox: Inbox, instances: InstanceSet, clock: Clock) -> None:
    """Schedule a model with `sequence_batching`. Batches are dispatched at the end of an event-loop iteration."""
    assert spec.sequence_batching is not None
    assert isinstance(instances, SequenceInstances)
    batcher = SequenceBatcher(spec, spec.sequence_batching, instances.sequences)
    instances.check_scheduler = batcher.check
    # With `direct` the rows of the next batch are known only after the last one.
    one_batch = not spec.sequence_batching.oldest
    hold = SequenceHold()
    failures = _Failures(batcher)
    until_ns: int | None = None
    while True:
        event = await inbox.next(until_ns)
        until_ns = ITERATION_END
        match event:
            case Submitted(request=request):
                batcher.add(request)
            case DeadlineReached():
                failures.fail_some()
                if hold.active and _is_held(hold, batcher, instances):
                    until_ns = None
                else:
                    until_ns = _start(batcher, instances, failures, clock.now_ns(), one_batch=one_batch)
                if failures.left:
                    until_ns = ITERATION_END
            case RequestRescheduled(request=request):
                if not batcher.reschedule(request, clock.now_ns()):
                    request.fail(errors.InternalError("the sequence ended before the request could be executed again"))
                elif request.cancelled:
                    failures.add(batcher.cancel(request), errors.RequestCancelled())
            case Cancelled(request=request):
                failures.add(batcher.cancel(request), errors.RequestCancelled())
            case InstanceLost(instance=instance, returned=returned):
                failures.add(batcher.lose(instance, returned), errors.SequenceLost(instance.name))
            case NoInstanceLeft(error=error):
                failures.begin(error)
                failures.fail_some()
            case InstanceIdle():
                failures.spare()


def _is_held(hold: SequenceHold, batcher: SequenceBatcher, instances: SequenceInstances) -> bool:
    batcher.place(instances.serving)
    backlog_count = batcher.backlog_count
    return hold.holds(instances.queued - backlog_count, backlog_count)


def _start(
    batcher: SequenceBatcher, instances: SequenceInstances, failures: _Failures, now_ns: int, *, one_batch: bool
) -> int | None:
    """End sequences whose time is over, place those that wait, and dispatch the batches that are ready.

    Returns when to act without another event, or None.
    """
    if instances.finished:
        for finished, at_ns in instances.finished:
            batcher.finished(finished, at_ns)
        instances.finished.clear()
    if batcher.may_expire(now_ns):
        failures.add(batcher.expire(now_ns), errors.SequenceTimeout())
    if batcher.waits:
        batcher.place(instances.serving)
    for instance, slot in batcher.slots_left():
        instance.end_sequence(slot)
    wait_ns: int | None = None
    for instance in batcher.ready():
        most = 1 if one_batch else instance.record.concurrency
        while instances.has_room(instance, most):
            batch = batcher.take(instance, now_ns)
            if batch is None:
                until_ns = batcher.wait_until_ns(instance)
                wait_ns = until_ns if wait_ns is None else min(wait_ns, until_ns)
                break
            instances.dispatch(instance, batch)
            if not batcher.is_ready(instance):
                break
    expiry_ns = batcher.next_expiry_ns(now_ns)
    if wait_ns is not None and (expiry_ns is None or wait_ns < expiry_ns):
        expiry_ns = wait_ns
    # The time may have passed since `now_ns`.
    return expiry_ns if expiry_ns is None or expiry_ns > now_ns else now_ns + 1


class _Failures:
    """Fails the requests of sequences that end, and ends all sequences when no instance is left.

    A sequence may have a hundred thousand requests: only some fail in each iteration of the event loop.
    """

    def __init__(self, batcher: SequenceBatcher) -> None:
        self._batcher = batcher
        #: Those that are still to be ended.
        self._sequences: deque[Sequence] = deque()
        #: Requests of those that have ended, and with what they fail.
        self._requests: deque[tuple[Request, errors.ServingError]] = deque()
        #: With what the requests of `_sequences` fail; None without any.
        self._error: errors.ServingError | None = None

    @property
    def left(self) -> bool:
        """Whether something is left to do in later iterations."""
        return bool(self._requests or self._sequences)

    def add(self, requests: list[Request], error: errors.ServingError) -> None:
        """Fail `requests`, which are no longer queued: some of them now."""
        if self.left or len(requests) > FAILED_AT_ONCE:
            self._requests.extend((request, error) for request in requests)
            return
        for request in requests:
            request.fail(error)

    def begin(self, error: errors.ServingError) -> None:
        """End the sequences of now, and fail their requests with `error`."""
        self._sequences = deque(self._batcher.sequences())
        self._error = error

    def spare(self) -> None:
        """An instance is there: it serves the sequences that have not ended."""
        self._sequences.clear()

    def fail_some(self) -> None:
        """End some sequences, and fail some requests that have not been cancelled meanwhile."""
        for _ in range(FAILED_AT_ONCE):
            if not self._requests and self._sequences:
                assert self._error is not None, "sequences are ended because of an error"
                error = self._error
                self._requests.extend((each, error) for each in self._batcher.end(self._sequences.popleft()))
            if not self._requests:
                if not self._sequences:
                    return
                continue
            request, error = self._requests.popleft()
            if not request.finished:
                request.fail(error)
