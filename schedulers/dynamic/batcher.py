"""Which queued requests run together, and when. No clock, no I/O, no asyncio.

Times are monotonic nanoseconds from the caller. Sizes count rows (the first dimension of the inputs), not requests.
The rule is Triton's (`GetDynamicBatch` in core's dynamic_batch_scheduler.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from schedulers.queue import RequestQueue
from schedulers.shapes import BatchKeys

if TYPE_CHECKING:
    from kernel.config.spec import DynamicBatching, ModelSpec
    from kernel.serving.request import Request


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

    def __init__(self, spec: ModelSpec, settings: DynamicBatching) -> None:
        self._max_rows = max(1, spec.max_batch_size)
        self._preferred = frozenset(settings.preferred_batch_sizes)
        self._max_preferred = max(self._preferred, default=self._max_rows)
        #: How long the oldest request may wait for a larger batch, in nanoseconds; 0 for no wait.
        self.delay_ns = settings.max_queue_delay_ns
        self._keys = BatchKeys(spec)
        self.queue = RequestQueue(settings)

    def add(self, request: Request) -> bool:
        """Queue a request; returns False if the queue is full."""
        return self.queue.add(request, self._keys.key(request))

    def put_back(self, requests: list[Request]) -> None:
        """Queue requests again that were taken and not started, before all others of their priority."""
        for request in reversed(requests):
            self.queue.put_back(request, self._keys.key(request))

    def take(self, now_ns: int) -> list[Request]:
        """Remove and return the batch to execute now; empty if it is better to wait."""
        if not self.queue.count:
            return []
        batch = self._candidate()
        overdue = self.delay_ns > 0 and now_ns - batch.oldest_ns >= self.delay_ns
        # A preferred size counts only while no request has waited too long.
        if batch.preferred_count and not overdue:
            return self.queue.take(batch.preferred_count)
        ready = batch.full or batch.rows >= self._max_preferred or overdue or not self.delay_ns
        return self.queue.take(batch.count) if ready else []

    def wait_until_ns(self) -> int | None:
        """Return when `take` may return a batch without another event, or None."""
        if not self.delay_ns:
            return None
        batch = self._candidate()
        return batch.oldest_ns + self.delay_ns if batch.count else None

    def _candidate(self) -> _Candidate:
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
            found.rows += rows
            found.count += 1
            if entry.request.queue_start_ns < found.oldest_ns:
                found.oldest_ns = entry.request.queue_start_ns
            if found.rows in self._preferred:
                found.preferred_count = found.count
        return found
