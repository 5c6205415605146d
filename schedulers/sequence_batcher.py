"""Which sequence has which slot of an instance, which requests are executed together, and when a sequence ends. Pure.

Each slot holds one sequence. Times are monotonic nanoseconds from the caller. The rules are Triton's
(sequence_batch_scheduler.cc); differences are in docs/differences.md.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

from schedulers.sequence_strategies import DirectBatches, OldestBatches

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.spec import ModelSpec, SequenceBatching
    from kernel.serving.batch import Batch
    from kernel.serving.instance import Instance
    from kernel.serving.live_sequences import LiveSequences, Sequence
    from kernel.serving.request import Request


class _InstanceSlots:
    """The free slots of one instance."""

    __slots__ = ("freed", "unused")

    def __init__(self) -> None:
        #: The lowest slot that was never used. A model may have many slots, and most are never used.
        self.unused = 0
        #: Heap of the other free slots.
        self.freed: list[int] = []

    def lowest(self) -> int:
        return self.freed[0] if self.freed else self.unused


class SlotTable:
    """Chooses a slot for a new sequence: the lowest one that is free in any instance (Triton).

    So sequences are spread over the instances, and batches of the strategy `direct` stay short.
    """

    def __init__(self, slot_count: int) -> None:
        """Each instance has `slot_count` slots."""
        self._slot_count = slot_count
        self._instances: dict[Instance, _InstanceSlots] = {}

    def take(self, instances: Iterable[Instance]) -> tuple[Instance, int] | None:
        """Take a free slot of one of `instances`, or return None if they have none."""
        best: Instance | None = None
        lowest = self._slot_count
        for instance in instances:
            slots = self._instances.get(instance)
            slot = 0 if slots is None else slots.lowest()
            if slot < lowest:
                best, lowest = instance, slot
        if best is None:
            return None
        slots = self._instances.setdefault(best, _InstanceSlots())
        if slots.freed:
            heapq.heappop(slots.freed)
        else:
            slots.unused += 1
        return best, lowest

    def free(self, instance: Instance, slot: int) -> None:
        """Give a slot back. Does nothing for an instance that is gone."""
        slots = self._instances.get(instance)
        if slots is not None:
            heapq.heappush(slots.freed, slot)

    def remove(self, instance: Instance) -> None:
        """The instance is gone, and its slots with it."""
        self._instances.pop(instance, None)


#: How many sequences end at once because their time is over. Thousands can begin together.
ENDED_AT_ONCE = 256


class SequenceBatcher:
    """Assigns sequences to slots, and makes the batches of each instance.

    A sequence is *placed* in a slot or waits in the *backlog*. A placed sequence is *ready* while it has queued
    requests and none is dispatched, and *idle* while it has no request at all.
    """

    def __init__(self, spec: ModelSpec, batching: SequenceBatching, live: LiveSequences) -> None:
        self._spec = spec
        self._batching = batching
        self._live = live
        self._slots = SlotTable(batching.slot_count)
        self._instances: dict[Instance, DirectBatches | OldestBatches] = {}
        #: Sequences without a slot, in the order of their START. The first entry of a plain dict is far from its begin
        #: after others were removed there.
        self._backlog: OrderedDict[Sequence, None] = OrderedDict()
        #: When requests of the backlog time out: a heap of time, a number that makes entries unequal, and sequence.
        self._expiries: list[tuple[int, int, Sequence]] = []
        self._expiry_count = 0
        #: Since when each idle sequence is idle, in ascending order.
        self._idle_since: OrderedDict[Sequence, int] = OrderedDict()
        #: The instances with sequences that are ready. An instance may stay in it for longer than that.
        self._ready: dict[Instance, DirectBatches | OldestBatches] = {}
        #: The sequences of each dispatched batch.
        self._running: dict[Batch, list[Sequence]] = {}
        #: Slots whose sequence is over, and of which the worker still has state.
        self._left: list[tuple[Instance, int]] = []

    # ---- requests ----------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, whose sequence is known (`LiveSequences.admit`)."""
        sequence = _sequence_of(request)
        sequence.queue.append(request)
        instance = sequence.instance
        if instance is not None:
            if sequence.batch is None and len(sequence.queue) == 1:
                self._idle_since.pop(sequence, None)
                self._add_ready(sequence, instance)
            return
        self._backlog[sequence] = None
        if request.timeout_us > 0:
            self._expiry_count += 1
            expires_ns = request.queue_start_ns + request.timeout_us * 1000
            heapq.heappush(self._expiries, (expires_ns, self._expiry_count, sequence))

    def reschedule(self, request: Request, now_ns: int) -> bool:
        """Queue a request again, before the others of its sequence: the model wants to execute it once more.

        Returns False if its sequence is over.
        """
        sequence = _sequence_of(request)
        if sequence.over or sequence.instance not in self._instances:
            return False
        request.sequence_start = request.sequence_end = False
        request.queue_start_ns = now_ns
        sequence.batch, sequence.begun = None, True
        sequence.queue.insert(0, request)
        assert sequence.instance is not None
        self._add_ready(sequence, sequence.instance)
        return True

    def cancel(self, request: Request) -> list[Request]:
        """End the sequence of a queued request whose client disconnected. Returns its queued requests, to be failed.

        Returns an empty list if the request is not queued.
        """
        sequence = _sequence_of(request)
        if request not in sequence.queue:
            return []
        return self._end(sequence)

    # ---- slots and batches -------------------------------------------------------------------

    def place(self, instances: Iterable[Instance]) -> None:
        """Give sequences of the backlog free slots of `instances`, in the order of their START."""
        while self._backlog:
            sequence = next(iter(self._backlog))
            found = self._slots.take(instances)
            if found is None:
                return
            del self._backlog[sequence]
            instance, slot = found
            self._live.placed(sequence, instance, slot)
            batches = self._instances.get(instance)
            if batches is None:
                kind = OldestBatches if self._batching.oldest else DirectBatches
                self._instances[instance] = kind(self._spec, self._batching, self._running)
            self._add_ready(sequence, instance)

    def _add_ready(self, sequence: Sequence, instance: Instance) -> None:
        batches = self._ready[instance] = self._instances[instance]
        batches.add(sequence)

    def ready(self) -> list[Instance]:
        """Return the instances with sequences that are ready."""
        for instance, batches in list(self._ready.items()):
            if not batches.is_ready():
                del self._ready[instance]
        return list(self._ready)

    def take(self, instance: Instance, now_ns: int) -> Batch | None:
        """Remove and return the batch that an instance with ready sequences executes now; None if it is better to wait.

        `finished` follows for each batch, unless the instance is lost.
        """
        return self._instances[instance].take(now_ns)

    def is_ready(self, instance: Instance) -> bool:
        """Whether an instance has sequences that are ready."""
        return self._instances[instance].is_ready()

    def finished(self, batch: Batch, now_ns: int) -> None:
        """A batch was executed at `now_ns`: its sequences are ready again, idle, or over."""
        for sequence in self._running.pop(batch, ()):
            if sequence.batch is not batch:
                continue  # it was rescheduled, or has ended with its instance
            sequence.batch, sequence.begun = None, True
            if sequence.queue:
                assert sequence.instance is not None
                self._add_ready(sequence, sequence.instance)
            elif sequence.ends or self._batching.iterative:  # the model is done with an iterative one
                self._release(sequence)
            else:
                self._idle_since[sequence] = now_ns

    def wait_until_ns(self, instance: Instance) -> int:
        """Return when `take` returns a batch without another event, for an instance with ready sequences."""
        return self._instances[instance].wait_until_ns()

    def slots_left(self) -> list[tuple[Instance, int]]:
        """Return the slots that sequences have left since the last call, if workers keep state of them."""
        left, self._left = self._left, []
        return left

    # ---- the end of sequences ----------------------------------------------------------------

    def next_expiry_ns(self, now_ns: int) -> int | None:
        """Return when a sequence may be idle for too long or a request of the backlog times out, or None.

        Sequences of batches that are executing can be idle for too long no earlier than the others.
        """
        expiry_ns: int | None = None
        for since_ns in self._idle_since.values():
            expiry_ns = since_ns + self._batching.max_idle_ns
            break
        else:
            if self._running:
                expiry_ns = now_ns + self._batching.max_idle_ns
        if self._expiries and (expiry_ns is None or self._expiries[0][0] < expiry_ns):
            expiry_ns = self._expiries[0][0]
        return expiry_ns

    def may_expire(self, now_ns: int) -> bool:
        """Whether `expire` has something to do."""
        expiry_ns = self.next_expiry_ns(now_ns)
        return expiry_ns is not None and expiry_ns <= now_ns

    @property
    def waits(self) -> bool:
        """Whether sequences wait for a slot."""
        return bool(self._backlog)

    @property
    def backlog_count(self) -> int:
        """How many requests of sequences without a slot are queued."""
        return sum(len(sequence.queue) for sequence in self._backlog)

    def expire(self, now_ns: int) -> list[Request]:
        """End sequences that are idle for too long or whose requests timed out in the backlog, not all at once.

        Returns the requests of the latter, to be failed.
        """
        for _ in range(ENDED_AT_ONCE):
            if not self._idle_since:
                break
            sequence, since_ns = next(iter(self._idle_since.items()))
            if now_ns < since_ns + self._batching.max_idle_ns:
                break
            self._release(sequence)
        failed: list[Request] = []
        for _ in range(ENDED_AT_ONCE):
            if not self._expiries or self._expiries[0][0] > now_ns:
                break
            _, _, sequence = heapq.heappop(self._expiries)
            if sequence in self._backlog:
                failed += self._end(sequence)
        return failed

    def lose(self, instance: Instance, returned: Iterable[Request]) -> list[Request]:
        """End the sequences of a lost instance. Returns their requests, to be failed.

        `returned` are requests that were dispatched and that the instance had not started. A sequence of which nothing
        was executed begins again in another slot.
        """
        for request in reversed(list(returned)):
            sequence = _sequence_of(request)
            if sequence.batch is not None:
                self._running.pop(sequence.batch, None)
                sequence.batch = None
            sequence.queue.insert(0, request)
        self._slots.remove(instance)
        self._instances.pop(instance, None)
        self._ready.pop(instance, None)
        failed: list[Request] = []
        fresh: list[Sequence] = []
        for sequence in [each for each in self._live if each.instance is instance]:
            if sequence.batch is None and not sequence.begun and sequence.queue:
                self._live.displaced(sequence)
                fresh.append(sequence)
            else:
                if sequence.batch is not None:
                    self._running.pop(sequence.batch, None)
                    sequence.batch = None
                failed += self._end(sequence)
        for sequence in reversed(fresh):
            self._backlog[sequence] = None
            self._backlog.move_to_end(sequence, last=False)
        self._left = [left for left in self._left if left[0] is not instance]
        return failed

    def sequences(self) -> list[Sequence]:
        """Return all sequences that are not over."""
        return list(self._live)

    def end(self, sequence: Sequence) -> list[Request]:
        """End a sequence. Returns its queued requests, to be failed; nothing if it is over."""
        return [] if sequence.over else self._end(sequence)

    def _end(self, sequence: Sequence) -> list[Request]:
        """End a sequence, as soon as its dispatched request is finished. Returns its queued requests."""
        if sequence.instance in self._instances:
            self._instances[sequence.instance].remove(sequence)
        queued, sequence.queue = sequence.queue, []
        if sequence.batch is None:
            self._release(sequence)
        else:
            self._live.close(sequence)
        return queued

    def _release(self, sequence: Sequence) -> None:
        """The sequence is over: free its slot."""
        self._backlog.pop(sequence, None)
        self._idle_since.pop(sequence, None)
        self._live.end(sequence)
        instance = sequence.instance
        if instance is not None and instance in self._instances:
            self._slots.free(instance, sequence.slot)
            if self._batching.has_state:
                self._left.append((instance, sequence.slot))

    # ---- invariants --------------------------------------------------------------------------

    def check(self) -> None:
        """Recompute the invariants."""
        self._live.check()
        for sequence in self._live:
            placed = sequence.instance is not None
            assert placed is not (sequence in self._backlog), f"sequence {sequence.id} is placed and in the backlog"
            idle = placed and not sequence.queue and sequence.batch is None
            assert idle is (sequence in self._idle_since), f"sequence {sequence.id} is wrongly idle"
            if sequence.batch is not None:
                assert sequence in self._running[sequence.batch], f"sequence {sequence.id} is not in its batch"
        assert list(self._idle_since.values()) == sorted(self._idle_since.values())


def _sequence_of(request: Request) -> Sequence:
    sequence = request.sequence
    assert sequence is not None, f"request {request.id!r} has no sequence"
    return sequence
