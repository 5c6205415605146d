"""The live sequences of a model version: which request belongs to which sequence, and where a sequence is. Pure.

A sequence is a number of requests that belong together and go to one instance. It lives from its START until its END
was executed, it was idle for too long, it was cancelled, or its instance was lost. Rules and texts are Triton's
(sequence_batch_scheduler.cc).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidRequest, Unavailable, Unsupported, request_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernel.config.spec import SequenceBatching
    from kernel.serving.batch import Batch
    from kernel.serving.instance import Instance
    from kernel.serving.request import Request


class Sequence(msgspec.Struct, eq=False):
    """A sequence. `LiveSequences` sets `id`, `ends` and `over`, the scheduler the others."""

    id: int | str
    #: Its requests that are not dispatched, in order. It is short, and a deque takes ten times the memory of a list.
    queue: list[Request]
    #: The instance that has the sequence; None while it waits for a slot.
    instance: Instance | None = None
    slot: int = -1
    #: The batch that has a request of the sequence and is not finished.
    batch: Batch | None = None
    #: A request was executed, so the instance may have state of the sequence.
    begun: bool = False
    #: Its END was received, or it is ending: no further request belongs to it.
    ends: bool = False
    over: bool = False


#: Our ids for sequences without one count down from here: each fits an INT32, and clients rarely begin with it.
_FIRST_OWN_ID = (1 << 31) - 1

#: The longest correlation id that is a text.
MAX_ID_BYTES = 128


class LiveSequences:
    """Gives each request its sequence, and knows how many sequences live."""

    def __init__(self, model_name: str, batching: SequenceBatching) -> None:
        self._model_name = model_name
        #: A sequence ends when the model does not reschedule its last request.
        self.iterative = batching.iterative
        self._ids_are_text = batching.correlation_id_is_text
        self._id_mask = (1 << batching.correlation_id_bits) - 1
        #: The sequences to which further requests may belong. Those with an id of ours are not among them: a client
        #: could join them.
        self._by_id: dict[int | str, Sequence] = {}
        self._all: dict[Sequence, None] = {}
        #: How many sequences live that the model knows by an id, as it gets the id, and the requests that are a
        #: sequence with an id of ours.
        self._ids: Counter[int | str] = Counter()
        self._own: dict[int | str, Request] = {}
        self._last_own_id = _FIRST_OWN_ID + 1
        #: How many sequences end when their last request is executed.
        self.ending = 0
        #: How many sequences each instance has; without those that have none.
        self._counts: dict[Instance, int] = {}
        #: Called when the last sequence of an instance ends, or the last one of all (None).
        self.on_none_left: Callable[[Instance | None], None] = _ignore

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._all)

    def has(self, correlation_id: int | str) -> bool:
        """Whether a sequence with this id lives that has not received its END."""
        return correlation_id in self._by_id

    def on(self, instance: Instance) -> int:
        """Return how many sequences `instance` has."""
        return self._counts.get(instance, 0)

    def admit(self, request: Request) -> bool:
        """Give a checked request its sequence, which begins if the request has START.

        Returns whether START restarts a sequence that lives. Raises `InvalidRequest` or `Unsupported`; then nothing has
        changed. `Unavailable` if the id is one that we have given to a sequence of which the model may have state.
        """
        self._check(request)
        correlation_id = request.correlation_id
        if not correlation_id:
            request.correlation_id = correlation_id = self._own_id()
            request.sequence_start, request.sequence_end = True, False
            # No other request can belong to it.
            request.sequence = sequence = Sequence(correlation_id, [], ends=True)
            self._begin(sequence)
            self._own[correlation_id] = request
            self.ending += 1
            return False
        found = self._by_id.get(correlation_id)
        restarted = found is not None and request.sequence_start
        if found is None:
            if not request.sequence_start:
                raise InvalidRequest(
                    f"inference request for sequence {correlation_id} to model '{self._model_name}' must specify the "
                    "START flag on the first request of the sequence"
                )
            if self._own and (other := self._own.get(self._as_model_gets(correlation_id))) is not None:
                self._move(other, request)
            found = self._by_id[correlation_id] = Sequence(correlation_id, [])
            self._begin(found)
        request.sequence = found
        if request.sequence_end:
            found.ends = True
            self.ending += 1
            del self._by_id[correlation_id]
        return restarted

    def _check(self, request: Request) -> None:
        correlation_id = request.correlation_id
        if isinstance(correlation_id, str) and len(correlation_id.encode()) > MAX_ID_BYTES:
            raise Unsupported(f"string correlation ID cannot be longer than {MAX_ID_BYTES} characters")
        if request.batch_size > 1:
            raise InvalidRequest(
                f"inference request to model '{self._model_name}' must specify batch-size 1 due to requirements of "
                "sequence batcher"
            )
        if not correlation_id and not self.iterative:
            raise InvalidRequest(
                f"inference request to model '{self._model_name}' must specify a non-zero or non-empty correlation ID"
            )

    def _begin(self, sequence: Sequence) -> None:
        self._all[sequence] = None
        self._ids[self._as_model_gets(sequence.id)] += 1

    def _forget_id(self, sequence: Sequence) -> None:
        key = self._as_model_gets(sequence.id)
        self._ids[key] -= 1
        if not self._ids[key]:
            del self._ids[key]
        own = self._own.get(key)
        if own is not None and own.sequence is sequence:
            del self._own[key]

    def _as_model_gets(self, correlation_id: int | str) -> int | str:
        """Return the same for ids that the model cannot tell apart."""
        if self._ids_are_text:
            return str(correlation_id)
        return correlation_id & self._id_mask if isinstance(correlation_id, int) else correlation_id

    def _own_id(self) -> int | str:
        """Return an id for a sequence that a client has not given one, of the type that the model gets.

        It is no id of a sequence that lives, also of one that has received its END: the model may have its state.
        """
        while True:
            self._last_own_id = self._last_own_id - 1 or _FIRST_OWN_ID
            own: int | str = str(self._last_own_id) if self._ids_are_text else self._last_own_id
            if own not in self._ids:
                return own

    def _move(self, request: Request, beginning: Request) -> None:
        """Give the sequence `request`, with an id of ours, another one: `beginning` begins a sequence with that id.

        Raises `Unavailable` if the model may have state under the id: the client would get answers of another client.
        """
        sequence = request.sequence
        assert sequence is not None
        if sequence.begun or sequence.batch is not None or request.dispatched:
            raise Unavailable(
                f"{request_prefix(beginning.id)}the server has given the correlation ID {sequence.id} to a request to "
                f"model '{self._model_name}' that had none, and it is being executed: begin the sequence with another "
                "ID, or later"
            )
        self._forget_id(sequence)
        request.correlation_id = sequence.id = self._own_id()
        self._ids[sequence.id] += 1
        self._own[sequence.id] = request

    # ---- for the scheduler -------------------------------------------------------------------

    def placed(self, sequence: Sequence, instance: Instance, slot: int) -> None:
        """The sequence got a slot of an instance."""
        sequence.instance, sequence.slot = instance, slot
        self._counts[instance] = self._counts.get(instance, 0) + 1

    def displaced(self, sequence: Sequence) -> None:
        """The sequence lost its slot, and may get another one."""
        instance, sequence.instance, sequence.slot = sequence.instance, None, -1
        if instance is not None:
            self._left(instance)

    def close(self, sequence: Sequence) -> None:
        """No further request may belong to the sequence; requests that it has are still executed."""
        if not sequence.ends:
            sequence.ends = True
            self.ending += 1
            del self._by_id[sequence.id]

    def end(self, sequence: Sequence) -> None:
        """The sequence is over. Its instance and slot can still be read."""
        self.close(sequence)
        self.ending -= 1
        sequence.over = True
        del self._all[sequence]
        self._forget_id(sequence)
        if sequence.instance is not None:
            self._left(sequence.instance)
        if not self._all:
            self.on_none_left(None)

    def clear(self) -> None:
        """End all sequences: the scheduler is gone."""
        for sequence in list(self._all):
            self.end(sequence)

    def _left(self, instance: Instance) -> None:
        count = self._counts[instance] - 1
        if count:
            self._counts[instance] = count
        else:
            del self._counts[instance]
            self.on_none_left(instance)

    def check(self) -> None:
        """Recompute the invariants."""
        counts: dict[Instance, int] = {}
        assert self.ending == sum(sequence.ends for sequence in self._all), "sequences that end are counted wrongly"
        for sequence in self._all:
            assert not sequence.over, f"sequence {sequence.id} is live and over"
            assert self._ids[self._as_model_gets(sequence.id)], f"sequence {sequence.id} has no id"
            assert sequence.ends is (self._by_id.get(sequence.id) is not sequence), f"sequence {sequence.id}: ends"
            if sequence.instance is not None:
                counts[sequence.instance] = counts.get(sequence.instance, 0) + 1
        assert sum(self._ids.values()) == len(self._all), "ids are counted wrongly"
        for own, request in self._own.items():
            assert request.sequence in self._all, f"an id of ours, {own}, belongs to a sequence that is over"
            assert request.sequence.id == request.correlation_id == own
            assert self._ids[own] == 1, f"two sequences have the id {own}, which is ours"
        assert counts == self._counts, "sequences of instances are counted wrongly"
        slots = [(s.instance, s.slot) for s in self._all if s.instance is not None]
        assert len(set(slots)) == len(slots), "two sequences have one slot"
        assert set(self._by_id.values()) <= set(self._all), "a sequence that is over has an id"


def _ignore(instance: Instance | None) -> None:
    """Do nothing: there is no waiter."""
