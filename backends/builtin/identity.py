"""The identity backend: the n-th output of a model is its n-th input. It is an example for authors of backends.

It shows all parts of a backend: it reads the configuration when it loads, converts inputs to arrays, and writes
outputs directly to their destination.
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
    """Returns inputs as outputs. If a request omits an optional input, its response omits the output."""

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
        for source, target in zip(inputs, outputs, strict=True):
            if source.datatype != target.datatype:
                raise BadConfig(
                    f"input '{source.name}' and output '{target.name}' of model '{arguments.model_name}' "
                    f"must have the same datatype, got {source.datatype} and {target.datatype}"
                )
        self._pairs = list(zip(inputs, outputs, strict=True))

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        timings.inputs_ready()
        timings.inferred()
        for request in requests:
            request.respond([*self._outputs(request)])

    def _outputs(self, request: WorkerRequest) -> list[OutputValue]:
        outputs = []
        for source, target in self._pairs:
            view = request.input(source.name)
            if view is None or not request.wants(target.name):
                continue
            array = input_array(view, source)
            array = array.reshape(target.client_shape(array.shape))
            destination = request.reserve(target.name, target.datatype, array.shape)
            if destination is not None:
                destination[...] = array
                array = destination
            outputs.append(OutputValue(target.name, target.datatype, array))
        return outputs
