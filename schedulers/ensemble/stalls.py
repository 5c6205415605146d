"""Streams that may wait for themselves: a decoupled model waits for credit, and the steps that would give it wait for
the model.

Credit for a response comes back when the steps behind it have ended. If such a step needs the instance that waits for
the credit, neither continues. Within one ensemble that is known from its steps: then the model gets its credit at once.
Between several ensembles it is not known; a request without progress for a long time gets its credit anyway. Triton
gives no credit at all: a model may be ahead without limit. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

from kernel.loop.clock import ITERATION_END

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.serving.model import Model
    from schedulers.ensemble.plan import EnsemblePlan

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
    """Return the names of the models that execute requests to `model`: itself, or those of its steps."""
    if model.spec.ensemble is None:
        return {model.name}
    found: set[str] = set()
    for step in model.spec.ensemble.steps:
        found |= _models_in(resolve(step.model_name, step.model_version, step.namespace), resolve)
    return found
