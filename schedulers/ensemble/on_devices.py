"""Which outputs of steps stay on a device: those that only one step, or only the response, needs and can have there.
Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.calls.device_tensors import leaves_device_tensors, takes_device_tensors
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kernel.serving.calls.device_tensors import Find
    from kernel.serving.model import Model
    from schedulers.ensemble.plan import EnsemblePlan, Route

#: How many selections of outputs are remembered: clients choose them.
_MOST_ROUTES = 64

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
