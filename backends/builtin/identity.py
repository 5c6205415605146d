"""The identity backend: the n-th output of a model is its n-th input. It is an example for authors of backends.

It reads the configuration when it loads, converts inputs to arrays, and writes outputs directly to their destination.
It reports nothing: the worker measures it. As Triton's, it can be made slow for tests, by parameters of the model:

creation_delay_sec              how long a load takes, in seconds
execute_delay_ms                how long an execution takes, in milliseconds
instance_wise_delay_multiplier  an execution of instance n takes n times as many delays, at least one
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backends.base import Backend
from backends.reshape import TensorShapes, input_array, tensor_specs, zeros
from backends.worker.request import OutputValue
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import ModelArguments, Timings
    from backends.worker.request import WorkerRequest


class Delays:
    """The delays of one model instance, in seconds."""

    def __init__(self, arguments: ModelArguments) -> None:
        """Raises `BadConfig` if a parameter is not a number."""
        multiplier = _number(arguments, "instance_wise_delay_multiplier")
        # Instances are named as `plan_instances` does it.
        number = int(arguments.instance_name.rpartition("_")[2]) if multiplier else 0
        self.creation_s = _number(arguments, "creation_delay_sec")
        self.execution_s = _number(arguments, "execute_delay_ms") / 1000 * max(1, multiplier * number)

    def create(self) -> None:
        """Wait as long as a load is to take."""
        time.sleep(self.creation_s)

    def execute(self) -> None:
        """Wait as long as an execution is to take."""
        time.sleep(self.execution_s)


def _number(arguments: ModelArguments, key: str) -> int:
    """Return a parameter of the model; 0 without it. Raises `BadConfig` for anything but a number."""
    text = arguments.parameter(key)
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal()):
        raise BadConfig(
            f"parameter '{key}' of model '{arguments.model_name}' must be a number of at least 0, got '{text}'"
        )
    return int(text)


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
            array = zeros(source, request.inputs) if view is None else input_array(view, source)
            array = array.reshape(target.client_shape(array.shape))
            destination = request.reserve(target.name, target.datatype, array.shape)
            if destination is not None:
                destination[...] = array
                array = destination
            outputs.append(OutputValue(target.name, target.datatype, array))
        return outputs
