"""The strategies of sequence batching: `direct` and `oldest`. Pure.

With `direct` a sequence has the row of its slot in each batch of its instance. A batch reaches from row 0 to the last
slot with a request; other rows in between are padding. The rule for the delay is Triton's
(`DirectSequenceBatch::BatcherThread`).

With `oldest` each instance has a dynamic batcher, with at most one request of each sequence in a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.spec import DynamicBatching
from kernel.serving.batch import Batch
from schedulers.dynamic_batcher import BatchKeys, DynamicBatcher

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec, SequenceBatching
    from kernel.serving.live_sequences import Sequence
    from kernel.serving.request import Request


class DirectBatches:
    """Makes the batches of one instance."""

    def __init__(self, spec: ModelSpec, batching: SequenceBatching, running: dict[Batch, list[Sequence]]) -> None:
        """Batches that are taken are added to `running`, with their sequences."""
        self._running = running
        self._keys = BatchKeys(spec)
        self._slot_count = batching.slot_count
        # Each of the two settings has an effect only with the other one (Triton).
        waits = batching.minimum_slot_utilization > 0
        self._delay_ns = batching.max_queue_delay_ns if waits else 0
        self._utilization = batching.minimum_slot_utilization
        #: Sequences with queued requests, of which none is dispatched.
        self._ready: dict[Sequence, None] = {}

    def is_ready(self) -> bool:
        """Whether a sequence has a request that can be executed now."""
        return bool(self._ready)

    def add(self, sequence: Sequence) -> None:
        """The first queued request of the sequence can be executed now."""
        self._ready[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """No request of the sequence is to be executed."""
        self._ready.pop(sequence, None)

    def take(self, now_ns: int) -> Batch | None:
        """Remove and return the batch to execute now, or None if it is better to wait.

        If requests cannot be in one batch, because their shapes differ, the oldest one decides.
        """
        ready = self._ready
        if not ready:
            return None
        if self._delay_ns and len(ready) / self._slot_count < self._utilization and now_ns < self.wait_until_ns():
            return None
        taken = list(ready)
        if len(taken) > 1:
            keys = {sequence: self._keys.key(sequence.queue[0]) for sequence in taken}
            key = keys[min(taken, key=_queued_at)]
            taken = [sequence for sequence in taken if keys[sequence] == key]
        last = 0
        for sequence in taken:
            last = max(last, sequence.slot)
            del ready[sequence]
        entries: list[Request | None] = [None] * (last + 1)
        batch = Batch(entries, slots=list(range(last + 1)), closed_by="sequences")
        for sequence in taken:
            entries[sequence.slot] = sequence.queue.pop(0)
            sequence.batch = batch
        self._running[batch] = taken
        return batch

    def wait_until_ns(self) -> int:
        """Return when `take` returns a batch without another event; call it only while a sequence is ready."""
        return min(sequence.queue[0].queue_start_ns for sequence in self._ready) + self._delay_ns


def _queued_at(sequence: Sequence) -> int:
    return sequence.queue[0].queue_start_ns


class OldestBatches:
    """Makes the batches of one instance."""

    def __init__(self, spec: ModelSpec, batching: SequenceBatching, running: dict[Batch, list[Sequence]]) -> None:
        """Batches that are taken are added to `running`, with their sequences."""
        self._running = running
        settings = DynamicBatching(
            preferred_batch_sizes=batching.preferred_batch_sizes, max_queue_delay_ns=batching.max_queue_delay_ns
        )
        self._batcher = DynamicBatcher(spec, settings)
        self._delays = settings.max_queue_delay_ns > 0
        #: The only sequence that is ready. Without a delay its request is a batch, and nothing is to be decided.
        self._only: Sequence | None = None

    def is_ready(self) -> bool:
        """Whether a sequence has a request that can be executed now."""
        return self._only is not None or self._batcher.queue.count > 0

    def add(self, sequence: Sequence) -> None:
        """The first queued request of the sequence can be executed now."""
        if not (self._delays or self.is_ready()):
            self._only = sequence
            return
        if self._only is not None:
            self._batcher.add(self._only.queue[0])
            self._only = None
        added = self._batcher.add(sequence.queue[0])
        assert added, "the queue of an instance's sequences has no limit"

    def remove(self, sequence: Sequence) -> None:
        """No request of the sequence is to be executed."""
        if sequence is self._only:
            self._only = None
        elif sequence.queue and sequence.batch is None:
            self._batcher.queue.cancel(sequence.queue[0])

    def take(self, now_ns: int) -> Batch | None:
        """Remove and return the batch to execute now, or None if it is better to wait."""
        only = self._only
        if only is not None:
            self._only = None
            only.batch = batch = Batch([only.queue.pop(0)], slots=[only.slot], closed_by="sequences")
            self._running[batch] = [only]
            return batch
        requests = self._batcher.take(now_ns)
        if not requests:
            return None
        slots: list[int] = []
        batch = Batch([*requests], slots=slots, closed_by="sequences")
        self._running[batch] = taken = []
        for request in requests:
            sequence = request.sequence
            assert sequence is not None, "a request without a sequence"
            sequence.queue.pop(0)
            sequence.batch = batch
            slots.append(sequence.slot)
            taken.append(sequence)
        return batch

    def wait_until_ns(self) -> int:
        """Return when `take` returns a batch without another event; call it only while a sequence is ready."""
        until_ns = self._batcher.wait_until_ns()
        assert until_ns is not None, "ready requests wait, without a delay"
        return until_ns
