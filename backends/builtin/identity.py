"""The identity backend: the n-th output of a model is its n-th input. It is an example for authors of backends.

It reads the configuration when it loads, converts inputs to arrays, and writes outputs directly to their destination.
As Triton's, it can be made slow for tests (`backends/builtin/delays.py`). It reports nothing: the worker measures it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from backends.base import Backend
from backends.builtin.delays import Delays
from backends.reshape import TensorShapes, input_array, tensor_specs
from backends.worker.request import OutputValue
from kernel.errors import BadConfig
from shm.arrays import to_array
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ModelArguments, Timings
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array

#: An empty string is its length alone.
_EMPTY_STRING_BYTE_SIZE = 4


class IdentityBackend(Backend):
    """Returns inputs as outputs. The output of an optional input that a request omits is zeros, as in Triton."""

    shares_worker = True

    def load(self, arguments: ModelArguments) -> None:
        self._delays = Delays(arguments)
        self._delays.create()
        inputs = list(tensor_specs(arguments.config, "input").values())
        outputs = list(tensor_specs(arguments.config, "output").values())
        if len(inputs) != len(outputs):
            raise BadConfig(
                f"model '{arguments.model_name}' must have as many outputs as inputs, "
                f"got {len(inputs)} inputs and {len(outputs)} outputs"
            )
        self._pairs: list[tuple[TensorShapes, TensorShapes]] = list(zip(inputs, outputs, strict=True))
        for source, target in self._pairs:
            if source.datatype != target.datatype:
                raise BadConfig(
                    f"input '{source.name}' and output '{target.name}' of model '{arguments.model_name}' "
                    f"must have the same datatype, got {source.datatype} and {target.datatype}"
                )

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        timings.inputs_ready()
        if self._delays.execution_s:
            self._delays.execute()
        timings.inferred()
        for request in requests:
            request.respond([*self._outputs(request)])

    def _outputs(self, request: WorkerRequest) -> list[OutputValue]:
        outputs = []
        for source, target in self._pairs:
            if not request.wants(target.name):
                continue
            view = request.input(source.name)
            array = input_array(view, source) if view is not None else _zeros(request, source)
            array = array.reshape(target.client_shape(array.shape))
            destination = request.reserve(target.name, target.datatype, array.shape)
            if destination is not None:
                destination[...] = array
                array = destination
            outputs.append(OutputValue(target.name, target.datatype, array))
        return outputs


def _zeros(request: WorkerRequest, source: TensorShapes) -> Array:
    """Return zeros in the shape of an input that the request omits, with one element where any size is allowed."""
    shape = [1 if dim < 0 else dim for dim in source.model_dims]
    if source.batched:
        shape.insert(0, request.inputs[0].shape[0] if request.inputs else 1)
    datatype = "UINT16" if source.datatype == "BF16" else source.datatype
    byte_size = math.prod(shape) * (DATATYPES[source.datatype].byte_size or _EMPTY_STRING_BYTE_SIZE)
    return to_array(datatype, shape, bytes(byte_size))
