"""`EnsemblePlan`: which steps read and write each tensor, and which steps the requested outputs need. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.serving.triton_input_order import triton_input_order
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kernel.config.ensemble_spec import EnsembleSpec, EnsembleStep
    from kernel.config.spec import ModelSpec

#: How many selections of outputs are remembered: clients choose them.
_MOST_ROUTES = 64


class Route(msgspec.Struct, frozen=True):
    """The part of an ensemble that makes the outputs which a request asks for."""

    #: The requested outputs, in the order in which Triton responds.
    outputs: tuple[str, ...]
    #: Tensor → the steps that read it and are needed.
    readers: dict[str, tuple[int, ...]]
    #: Tensor → how many needed steps read it, and one more if it is a requested output.
    uses: dict[str, int]


class EnsemblePlan:
    """The steps of one ensemble, ready to be followed by requests."""

    def __init__(self, spec: ModelSpec, ensemble: EnsembleSpec) -> None:
        self.spec = spec
        self.steps: tuple[EnsembleStep, ...] = ensemble.steps
        #: Tensor → the step that writes it. Inputs of the ensemble are not in it.
        self.writers = {tensor: index for index, step in enumerate(self.steps) for tensor in step.outputs.values()}
        self.optional_inputs = tuple(name for name, tensor in spec.inputs.items() if tensor.optional)
        #: By step: its outputs as a request for them. Shared by all requests, so without places.
        self.asked = tuple([RequestedOutput(name) for name in step.outputs] for step in self.steps)
        self._order = triton_input_order(list(spec.outputs))
        self._all = self._route(spec.outputs)
        self._routes: dict[frozenset[str], Route] = {}

    def route(self, requested: Iterable[RequestedOutput]) -> Route:
        """Return the part of the ensemble that a request needs; all of it if it names no outputs."""
        names = frozenset(output.name for output in requested)
        if not names:
            return self._all
        route = self._routes.get(names)
        if route is None:
            route = self._route(names)
            if len(self._routes) < _MOST_ROUTES:
                self._routes[names] = route
        return route

    def sender(self, route: Route, decoupled: Collection[int]) -> int | None:
        """Return the step of whose responses each becomes one of the ensemble; None if the ensemble has one response.

        `decoupled` are the steps whose models are. All outputs belong to the responses of the same step
        (`kernel/config/check_steps.py`), so that any way back from any output leads to it.
        """
        tensor = route.outputs[0]
        seen: set[int] = set()
        while (step := self.writers.get(tensor)) is not None and step not in seen:
            if step in decoupled:
                return step
            seen.add(step)
            tensor = next(iter(self.steps[step].inputs.values()))
        return None

    def behind(self, step: int) -> set[int]:
        """Return the steps that need an output of `step`, directly or through others."""
        found: set[int] = set()
        unseen = set(self.steps[step].outputs.values())
        while unseen:
            tensor = unseen.pop()
            for reader in self._all.readers.get(tensor, ()):
                if reader not in found:
                    found.add(reader)
                    unseen |= set(self.steps[reader].outputs.values())
        return found

    def _route(self, outputs: Collection[str]) -> Route:
        needed: set[int] = set()
        unseen = list(outputs)
        while unseen:
            writer = self.writers.get(unseen.pop())
            if writer is not None and writer not in needed:
                needed.add(writer)
                unseen += self.steps[writer].inputs.values()
        readers: dict[str, tuple[int, ...]] = {}
        for index in sorted(needed):
            for tensor in dict.fromkeys(self.steps[index].inputs.values()):
                readers[tensor] = (*readers.get(tensor, ()), index)
        ordered = tuple(name for name in self._order if name in outputs)
        uses = {tensor: len(steps) for tensor, steps in readers.items()}
        for name in ordered:
            uses[name] = uses.get(name, 0) + 1
        return Route(ordered, readers, uses)
