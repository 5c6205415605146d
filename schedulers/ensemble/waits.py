"""Calls and streams of an ensemble that wait: limits of steps, and streams that may wait for themselves. Pure.

`max_inflight_requests` is the most requests that each step executes at the same time. The limit counts the requests of
all requests to the ensemble, as in Triton. Calls above it wait in order. While they wait, the decoupled steps that made
their inputs get no credit for them, so that these steps stop as well. A call that has waited may fail as soon as it
starts, which lets the next one start. Clients may have left tens of thousands, so an event-loop iteration starts only
some.

A decoupled model waits for credit, which comes back when the steps behind it have ended. If such a step needs the
instance that waits for the credit, neither continues. Within one ensemble that is known from its steps: then the model
gets its credit at once. Between several ensembles it is not known; a request without progress for a long time gets its
credit anyway. Triton gives no credit at all: a model may be ahead without limit.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from kernel.loop.clock import ITERATION_END

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.serving.model import Model
    from schedulers.ensemble.plan import EnsemblePlan

#: A call that has waited so long starts in any case, as in Triton: a model that has not responded for that long may be
#: one that waits for another response of this ensemble.
LONGEST_WAIT_NS = 300_000_000_000

#: How many calls that have waited start in an event-loop iteration. To start one takes up to 0.1 ms.
MOST_STARTED = 32

Call = TypeVar("Call")


class StepLimits(Generic[Call]):
    """Counts the running calls of each step. `limit` is at least 1."""

    def __init__(self, limit: int, step_count: int) -> None:
        self._limit = limit
        #: By step: calls that run, or start next.
        self._running = [0] * step_count
        #: By step: waiting calls, the oldest first, and since when. A plain dict would have to be searched for its
        #: first entry behind those that were removed.
        self._waiting: list[OrderedDict[Call, int]] = [OrderedDict() for _ in range(step_count)]
        #: Calls that start next, in order.
        self._next: OrderedDict[Call, None] = OrderedDict()
        #: How many calls that have waited were started in this iteration.
        self._started_count = 0

    def start(self, step: int, call: Call, now_ns: int) -> bool:
        """Whether `call` may start now. Otherwise it waits, and `next_call` returns it."""
        if self._running[step] < self._limit:
            self._running[step] += 1
            return True
        self._waiting[step][call] = now_ns
        return False

    def ended(self, step: int) -> None:
        """A running call has ended: the one that has waited longest may start instead."""
        self._running[step] -= 1
        waiting = self._waiting[step]
        if waiting and self._running[step] < self._limit:
            self._running[step] += 1
            self._next[waiting.popitem(last=False)[0]] = None

    def remove(self, step: int, call: Call) -> None:
        """Remove a call that waits, or starts next."""
        if self._waiting[step].pop(call, None) is None:
            del self._next[call]
            self.ended(step)

    def next_call(self) -> Call | None:
        """Return a call that has waited and starts now; None if there is none for this iteration."""
        if not self._next or self._started_count >= MOST_STARTED:
            return None
        self._started_count += 1
        return self._next.popitem(last=False)[0]

    def begin_iteration(self, now_ns: int) -> list[int]:
        """Let calls start that have waited too long, some of them. Returns their steps. Called at `until_ns`."""
        self._started_count = 0
        found: list[int] = []
        for step, waiting in enumerate(self._waiting):
            while len(found) < MOST_STARTED and waiting and now_ns - next(iter(waiting.values())) >= LONGEST_WAIT_NS:
                self._next[waiting.popitem(last=False)[0]] = None
                self._running[step] += 1
                found.append(step)
        return found

    @property
    def until_ns(self) -> int | None:
        """When to call `begin_iteration`, or None."""
        if self._started_count or self._next:
            return ITERATION_END
        first = [next(iter(waiting.values())) for waiting in self._waiting if waiting]
        return min(first) + LONGEST_WAIT_NS if first else None

    def check(self) -> None:
        """Recompute the invariants."""
        assert len(self._next) <= sum(self._running)
        for running, waiting in zip(self._running, self._waiting, strict=True):
            assert running >= 0
            assert not waiting or running >= self._limit


#: How long no step of a request may have responded before its streams get their credit.
LONGEST_STALL_NS = 30_000_000_000

#: How many of them are returned in one event-loop iteration.
_MOST_AT_ONCE = 64

Stream = TypeVar("Stream")


class StalledStreams(Generic[Stream]):
    """When each request with a stream has last made progress; the longest without progress is first."""

    def __init__(self) -> None:
        #: A plain dict would have to be searched for its first entry behind all those that have moved.
        self._moved_ns: OrderedDict[Stream, int] = OrderedDict()
        #: Whether more may be overdue than were returned.
        self._more = False

    def moved(self, stream: Stream, now_ns: int) -> None:
        """A request has begun, or a step of it has responded."""
        self._moved_ns[stream] = now_ns
        self._moved_ns.move_to_end(stream)

    def remove(self, stream: Stream) -> None:
        self._moved_ns.pop(stream, None)

    def overdue(self, now_ns: int) -> list[Stream]:
        """Return the requests that have made no progress for too long, some of them at a time.

        Each is returned again after the same time.
        """
        found: list[Stream] = []
        for stream, moved_ns in self._moved_ns.items():
            if len(found) == _MOST_AT_ONCE or now_ns - moved_ns < LONGEST_STALL_NS:
                break
            found.append(stream)
        for stream in found:
            self.moved(stream, now_ns)
        self._more = len(found) == _MOST_AT_ONCE
        return found

    @property
    def until_ns(self) -> int | None:
        """When to ask for the next `overdue`, or None."""
        if self._more:
            return ITERATION_END
        first = next(iter(self._moved_ns.values()), None)
        return None if first is None else first + LONGEST_STALL_NS


def feeding_themselves(
    plan: EnsemblePlan, models: Sequence[Model], resolve: Callable[[str, str, str], Model]
) -> frozenset[int]:
    """Return the decoupled steps whose responses go to a step that needs the same model.

    `models` are the versions of the steps. Raises `ServingError` if a model of a nested ensemble is not there.
    """
    if not plan.spec.decoupled:
        return frozenset()
    needed = [_models_in(model, resolve) for model in models]
    return frozenset(
        step
        for step, model in enumerate(models)
        if model.spec.decoupled and any(needed[step] & needed[other] for other in plan.behind(step))
    )


def _models_in(model: Model, resolve: Callable[[str, str, str], Model]) -> set[str]:
    """Return the names of the models that execute requests to `model`: itself, or the models of its steps."""
    if model.spec.ensemble is None:
        return {model.name}
    found: set[str] = set()
    for step in model.spec.ensemble.steps:
        found |= _models_in(resolve(step.model_name, step.model_version, step.namespace), resolve)
    return found
