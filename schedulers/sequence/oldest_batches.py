"""The strategy `oldest`: a dynamic batcher for each instance, with at most one request of each sequence. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.spec import DynamicBatching
from kernel.serving.batch import Batch
from schedulers.dynamic.batcher import DynamicBatcher

if TYPE_CHECKING:
    from kernel.config.sequence_spec import SequenceBatching
    from kernel.config.spec import ModelSpec
    from kernel.serving.sequences.sequence import Sequence


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
