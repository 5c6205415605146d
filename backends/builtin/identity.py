"""The identity backend: the n-th output of a model is its n-th input. A backend to copy from.

It shows all that a backend needs: what it reads from the configuration when it loads, where inputs are,
and how an output is written straight to its final place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.base import Backend
from backends.reshape import TensorShapes, input_array, tensor_specs
from backends.worker.request import OutputValue
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Host, ModelArguments, Timings
    from backends.worker.request import WorkerRequest


class IdentityBackend(Backend):
    """Returns inputs as outputs. An optional input that is left out leaves its output out."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._pairs: list[tuple[TensorShapes, TensorShapes]] = []

    def load(self, arguments: ModelArguments) -> None:
        inputs = list(tensor_specs(arguments.config, "input").values())
        outputs = list(tensor_specs(arguments.config, "output").values())
        if len(inputs) != len(outputs):
            raise BadConfig(
                f"model '{arguments.model_name}' must have as many outputs as inputs, "
                f"got {len(inputs)} inputs and {len(outputs)} outputs"
            )
        for given, returned in zip(inputs, outputs, strict=True):
            if given.datatype != returned.datatype:
                raise BadConfig(
                    f"input '{given.name}' and output '{returned.name}' of model '{arguments.model_name}' "
                    f"must have the same datatype, got {given.datatype} and {returned.datatype}"
                )
        self._pairs = list(zip(inputs, outputs, strict=True))

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        timings.inputs_ready()
        timings.inferred()
        for request in requests:
            request.respond([*self._outputs(request)])

    def _outputs(self, request: WorkerRequest) -> list[OutputValue]:
        outputs = []
        for given, returned in self._pairs:
            view = request.input(given.name)
            if view is None or not request.wants(returned.name):
                continue
            array = input_array(view, given)
            array = array.reshape(returned.client_shape(array.shape))
            place = request.reserve(returned.name, returned.datatype, array.shape)
            if place is not None:
                place[...] = array
                array = place
            outputs.append(OutputValue(returned.name, returned.datatype, array))
        return outputs
