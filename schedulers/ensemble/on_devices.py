"""Which outputs of steps stay on a device: those that one step reads, and that can be read there. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.calls.device_tensors import leaves_device_tensors, takes_device_tensors
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.serving.model import Model
    from schedulers.ensemble.plan import EnsemblePlan, Route

#: How many selections of outputs are remembered: clients choose them.
_MOST_ROUTES = 64

#: By step: its outputs as a request for them.
AskedOutputs = tuple[list[RequestedOutput], ...]


class OutputsOnDevices:
    """The outputs of the steps of one ensemble, for versions of their models."""

    def __init__(self, plan: EnsemblePlan, models: Sequence[Model]) -> None:
        self._plan = plan
        self._models = models
        # With streams a tensor is read once for each response, and a model may change what it reads on a device.
        decoupled = any(model.spec.decoupled for model in models)
        self._leaving = () if decoupled else [step for step, each in enumerate(models) if leaves_device_tensors(each)]
        self._taking = {step for step, each in enumerate(models) if self._leaving and takes_device_tensors(each)}
        self._found: dict[tuple[str, ...], AskedOutputs] = {}

    def asked(self, route: Route) -> AskedOutputs:
        """Return what is asked of the steps for a part of the ensemble. Shared by all requests, so without places."""
        if not self._taking:  # usual
            return self._plan.asked
        found = self._found.get(route.outputs)
        if found is None:
            found = tuple(
                [RequestedOutput(name, on_device=self._stays(step, tensor, route)) for name, tensor in outputs]
                for step, outputs in enumerate(each.outputs.items() for each in self._plan.steps)
            )
            if len(self._found) < _MOST_ROUTES:
                self._found[route.outputs] = found
        return found

    def _stays(self, step: int, tensor: str, route: Route) -> bool:
        if step not in self._leaving or route.uses.get(tensor) != 1:
            return False
        readers = route.readers.get(tensor, ())  # none where only the client reads it
        return any(
            reader in self._taking and list(self._plan.steps[reader].inputs.values()).count(tensor) == 1
            for reader in readers
        )
