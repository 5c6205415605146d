"""Which queued requests run together, and when. No clock, no I/O, no asyncio.

Times are monotonic nanoseconds from the caller. Sizes count rows (the first dimension of the inputs), not requests. The
rule is Triton's (`GetDynamicBatch` in core's dynamic_batch_scheduler.cc), except that a delay ends early when no more
requests are expected. Triton forms a batch when the rule allows it, and adds requests until an instance takes it. Here
a batch is formed when an instance can take it, which has the same result.

Which requests may share a batch is Triton's rule, too: inputs with a variable dimension must have equal shapes, unless
the configuration allows them to be ragged; shape tensors must be equal; for a model with optional inputs, the requests
must have the same inputs.

Whether it pays to wait for a larger batch is learned from earlier waits. `max_queue_delay_microseconds` is the longest
time that a request waits for others. Often none can come: four clients that wait for their responses send four
requests, and for the rest of the delay all of them wait for nothing. So if many waits in a row have ended with the same
number of rows, and nothing came in the second half of the delay, a batch with this number of rows starts at once. Now
and then one waits again, to notice new clients.

What was learned may be wrong. Two rules make mistakes rare:

- If requests arrive irregularly, many waits can be fruitless by chance. Each time a wait shows that more requests come,
  the next decision needs twice as many fruitless waits.
- A request that comes just after a batch has started waits until its execution ends. If an execution takes longer than
  the delay, the decision needs more fruitless waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.spec import DynamicBatching
from schedulers.queue import RequestQueue

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


#: After this many fruitless waits in a row, batches start at once, if an execution takes no longer than the delay. If
#: it takes ten times the delay, ten times as many waits are needed. With requests at random times, 0.3 per delay on
#: average, one of 120 series of 16 waits is fruitless by chance.
ENOUGH = 16

#: After this many batches that started at once, one waits. It costs little time, and new clients are noticed soon.
WAIT_AFTER = 64

#: The number of waits is doubled at most this often. It has its first value again after `ENOUGH` waits, one after each
#: `WAIT_AFTER` batches, of which none showed a mistake.
MOST_DOUBLINGS = 3


class FruitlessWaits:
    """The last waits of one model's batches. Times are monotonic nanoseconds from the caller; sizes are in rows."""

    def __init__(self, delay_ns: int, execution_ns: Callable[[], int], *, learns: bool = True) -> None:
        """`delay_ns` is the longest wait, `execution_ns` returns how long executions take.

        Without `learns` each batch waits for the whole delay.
        """
        self._delay_ns = delay_ns
        self._execution_ns = execution_ns
        self._learns = learns
        #: The number of rows with which the last waits have ended, and how many fruitless ones in a row.
        self._rows = 0
        self._count = 0
        #: How many are enough, and how often this number was doubled.
        self._enough = ENOUGH
        self._doublings = 0
        #: How many waits have confirmed what was learned since it was wrong.
        self._confirmed = 0
        #: How many batches have started at once since the last wait.
        self._started_at_once = 0
        #: The batch that waits: its rows, and since when it has them.
        self._waiting_rows = 0
        self._since_ns = 0

    def should_wait(self, rows: int, now_ns: int) -> bool:
        """Return whether a batch with `rows` rows waits for more, although an instance is free. If not, it starts."""
        if rows == self._rows and self._count >= self._enough and self._started_at_once < WAIT_AFTER:
            self._started_at_once += 1
            self._waiting_rows = 0
            return False
        if rows != self._waiting_rows:
            self._waiting_rows, self._since_ns = rows, now_ns
        return True

    def waited(self, rows: int, now_ns: int) -> None:
        """A batch starts because its oldest request has waited for the whole delay, perhaps for an instance."""
        fruitless = rows == self._waiting_rows and 2 * (now_ns - self._since_ns) >= self._delay_ns
        if rows > self._rows:
            self._note_mistake()
        if not fruitless or not self._learns:
            self._count = 0
        elif rows == self._rows:
            self._count += 1
            self._note_confirmation()
        else:
            self._rows, self._count = rows, 1
        self._started_at_once = self._waiting_rows = 0
        if self._count >= ENOUGH:
            longer = max(self._delay_ns, self._execution_ns())
            self._enough = (ENOUGH * longer // self._delay_ns) << self._doublings

    def filled(self) -> None:
        """A batch starts because it is as large as it may be: enough requests come."""
        self._note_mistake()
        self._count = self._started_at_once = self._waiting_rows = 0

    def _note_confirmation(self) -> None:
        if self._started_at_once == WAIT_AFTER:
            self._confirmed += 1
            if self._confirmed == ENOUGH:
                self._doublings = 0

    def _note_mistake(self) -> None:
        """A batch has got more rows than expected. After batches that started at once, these should have waited."""
        if self._started_at_once == WAIT_AFTER:
            self._confirmed = 0
            self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)


class BatchKeys:
    """Makes a key for each request. Requests with equal keys can share a batch."""

    def __init__(self, spec: ModelSpec) -> None:
        inputs = spec.inputs.items()
        self._variable = frozenset(n for n, tensor in inputs if -1 in tensor.dims and not tensor.allow_ragged_batch)
        self._shape_tensors = frozenset(name for name, tensor in inputs if tensor.is_shape_tensor)
        self._optional = any(tensor.optional for _, tensor in inputs)
        self._all_equal = not (self._variable or self._shape_tensors or self._optional)

    def key(self, request: Request) -> Hashable:
        """Return the key. The batch dimension is not part of it."""
        if self._all_equal:
            return None
        parts: list[tuple[str, tuple[int, ...], bytes | None]] = []
        for tensor in request.inputs:
            if tensor.name in self._shape_tensors:
                if tensor.data is None:  # its values are not in the message: too many for a shape
                    return object()
                parts.append((tensor.name, tuple(tensor.shape), bytes(tensor.data)))
            elif tensor.name in self._variable:
                parts.append((tensor.name, tuple(tensor.shape[1:]), None))
            elif self._optional:
                parts.append((tensor.name, (), None))
        if len(parts) > 1:
            parts.sort(key=_name)
        return tuple(parts)


def _name(part: tuple[str, tuple[int, ...], bytes | None]) -> str:
    return part[0]
