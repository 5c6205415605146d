"""Which queued requests run together, and when. No clock, no I/O, no asyncio.

Times are monotonic nanoseconds from the caller. Sizes count rows (the first dimension of the inputs), not requests. The
rule is Triton's (`GetDynamicBatch` in core's dynamic_batch_scheduler.cc), except that a delay ends early when no more
requests are expected (`schedulers/dynamic/fruitless_waits.py`). Triton forms a batch when the rule allows it,
and adds requests until an instance takes it. Here a batch is formed when an instance can take it, which has the same
result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.spec import DynamicBatching
from schedulers.dynamic.fruitless_waits import FruitlessWaits
from schedulers.queue import RequestQueue
from schedulers.shapes import BatchKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kernel.config.spec import ModelSpec
    from kernel.serving.request import Request
    from schedulers.batching_rules import BatchingRule


class _Candidate(msgspec.Struct):
    """The largest batch that can be made from the front of the queue."""

    count: int = 0
    rows: int = 0
    #: How many requests the largest prefix with a preferred number of rows has; 0 for none.
    preferred_count: int = 0
    #: Whether the next request does not fit. Then waiting cannot make the batch larger.
    full: bool = False
    oldest_ns: int = 0


class DynamicBatcher:
    """Groups queued requests into batches of at most `max_batch_size` rows."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: DynamicBatching | None,
        rule: BatchingRule | None = None,
        hold_until_count: int = 0,
        execution_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """Without `settings` each request is a batch of its own.

        `rule` may keep requests out of a batch. No batch is made before `hold_until_count` requests are queued, once.
        `execution_ns` returns how long executions take: after long ones a delay ends early less often.
        """
        self._alone = settings is None
        settings = settings or DynamicBatching()
        self._max_rows = max(1, spec.max_batch_size)
        self._preferred = frozenset(settings.preferred_batch_sizes)
        self._max_preferred = max(self._preferred, default=self._max_rows)
        #: How long the oldest request may wait for a larger batch, in nanoseconds; 0 for no wait.
        self.delay_ns = settings.max_queue_delay_ns
        self._waits = FruitlessWaits(self.delay_ns, execution_ns, learns=settings.delay_may_end_early)
        self._keys = BatchKeys(spec)
        #: Whether a request may be a suspect, which is executed alone and does not wait for others.
        self._isolates = spec.isolates_poison
        self._rule = rule
        self._hold_until_count = hold_until_count
        self.queue = RequestQueue(settings, spec.fair)
        #: Why the batch that was taken last did not wait for more; see `Batch`.
        self.closed_by = "alone"

    def add(self, request: Request) -> bool:
        """Queue a request; returns False if the queue is full."""
        alone = self._alone or request.suspected
        return self.queue.add(request, object() if alone else self._keys.key(request))  # as `_key`, without its call

    def put_back(self, requests: list[Request]) -> None:
        """Queue requests again that were taken and not started, before all others of their priority."""
        for request in reversed(requests):
            self.queue.put_back(request, self._key(request))

    def take(self, now_ns: int) -> list[Request]:
        """Remove and return the batch to execute now; empty if it is better to wait."""
        if not self.queue.count or (self._hold_until_count and self._holds()):
            return []
        if self._isolates and next(iter(self.queue.in_order())).request.suspected:
            self.closed_by = "alone"
            return self.queue.take(1)
        batch = self._largest(None, None) if self._rule is None else self._candidate()
        overdue = self.delay_ns > 0 and now_ns - batch.oldest_ns >= self.delay_ns
        # A preferred size counts only while no request has waited too long.
        if batch.preferred_count and not overdue:
            self.closed_by = "preferred size"
            self._waits.filled()
            return self.queue.take(batch.preferred_count)
        if batch.full or batch.rows >= self._max_preferred:
            self.closed_by = "full" if not self._alone else "alone"
            self._waits.filled()
        elif overdue:
            self.closed_by = "delay"
            self._waits.waited(batch.rows, now_ns)
        elif self.delay_ns and self._waits.should_wait(batch.rows, now_ns):
            return []
        elif self.delay_ns:
            self.closed_by = "no more expected"
        else:
            self.closed_by = "idle instance"
        return self.queue.take(batch.count)

    def wait_until_ns(self) -> int | None:
        """Return when `take` may return a batch without another event, or None."""
        if not self.delay_ns or self._holds():
            return None
        batch = self._candidate()
        return batch.oldest_ns + self.delay_ns if batch.count else None

    def close(self) -> None:
        """End the rule."""
        if self._rule is not None:
            self._rule.finalize()

    def _key(self, request: Request) -> Hashable:
        return object() if self._alone or request.suspected else self._keys.key(request)

    def _holds(self) -> bool:
        """Whether too few requests are queued for the first batch, which is still to be made."""
        if self.queue.count < self._hold_until_count:
            return True
        self._hold_until_count = 0
        return False

    def _candidate(self) -> _Candidate:
        rule = self._rule
        if rule is None:
            return self._largest(None, None)
        batch = rule.initialize_batch()
        try:
            return self._largest(rule, batch)
        finally:
            rule.finalize_batch(batch)

    def _largest(self, rule: BatchingRule | None, batch: object) -> _Candidate:
        """Return the batch that the front of the queue makes; `rule`, if any, is asked about each request."""
        found = _Candidate()
        key = None
        for entry in self.queue.in_order():
            rows = entry.request.batch_size or 1
            if not found.count:
                key, found.oldest_ns = entry.key, entry.request.queue_start_ns
            else:
                # One more request would exceed every preferred size: the batch without it is the best.
                if found.rows + rows > self._max_preferred and not found.preferred_count:
                    found.preferred_count = found.count
                if found.rows + rows > self._max_rows or entry.key != key:
                    found.full = True
                    break
            if rule is not None and not rule.include_request(entry.request, batch):
                found.full = True
                if found.count:
                    break
            found.rows += rows
            found.count += 1
            if entry.request.queue_start_ns < found.oldest_ns:
                found.oldest_ns = entry.request.queue_start_ns
            if found.rows in self._preferred:
                found.preferred_count = found.count
            if found.full:
                break
        return found
