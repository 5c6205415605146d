"""`EnsemblePlan`: which steps read and write each tensor, and which steps the requested outputs need. Pure.

Outputs of steps stay on a device if only one step, or only the response, needs them and can have them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.serving.device_tensors import leaves_device_tensors, takes_device_tensors
from kernel.serving.validation import triton_input_order
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from kernel.config.spec import EnsembleSpec, EnsembleStep, ModelSpec
    from kernel.serving.device_tensors import Find
    from kernel.serving.model import Model

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
        (`kernel/config/check_ensemble.py`), so that any way back from any output leads to it.
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


#: By step: its outputs as a request for them.
AskedOutputs = tuple[list[RequestedOutput], ...]


class OutputsOnDevices:
    """The outputs of the steps of one ensemble, for versions of their models."""

    def __init__(self, plan: EnsemblePlan, models: Sequence[Model], find: Find) -> None:
        self._plan = plan
        # With streams a tensor is read once for each response, and a model may change what it reads on a device.
        decoupled = any(model.spec.decoupled for model in models)
        self._leaving = (
            set() if decoupled else {n for n, each in enumerate(models) if leaves_device_tensors(each, find)}
        )
        #: Each step with an input that its model takes on a device.
        self._taking = {
            (step, name)
            for step, model in enumerate(models if self._leaving else ())
            for name in plan.steps[step].inputs
            if takes_device_tensors(model, [name], find)
        }
        self._found: dict[tuple[tuple[str, ...], ...], AskedOutputs] = {}

    def asked(self, route: Route, requested: Iterable[RequestedOutput]) -> AskedOutputs:
        """Return what is asked of the steps for a part of the ensemble. Shared by all requests, so without places.

        `requested` are the outputs that the request to the ensemble names: a model that calls it may take its results
        on a device.
        """
        if not self._leaving:  # usual
            return self._plan.asked
        wanted = tuple([output.name for output in requested if output.on_device])
        if not wanted and not self._taking:
            return self._plan.asked
        found = self._found.get((route.outputs, wanted))
        if found is None:
            found = tuple(
                [RequestedOutput(name, on_device=self._stays(step, tensor, route, wanted)) for name, tensor in outputs]
                for step, outputs in enumerate(each.outputs.items() for each in self._plan.steps)
            )
            if len(self._found) < _MOST_ROUTES:
                self._found[route.outputs, wanted] = found
        return found

    def _stays(self, step: int, tensor: str, route: Route, wanted: tuple[str, ...]) -> bool:
        if step not in self._leaving or route.uses.get(tensor) != 1:
            return False
        readers = route.readers.get(tensor, ())
        if not readers:  # only the response has it
            return tensor in wanted
        inputs = self._plan.steps[readers[0]].inputs.items()
        names = [name for name, read in inputs if read == tensor]
        return len(names) == 1 and (readers[0], names[0]) in self._taking
