"""The identity backend: the n-th output of a model is its n-th input. It is an example for authors of backends.

It shows all parts of a backend: it reads the configuration when it loads, converts inputs to arrays, and writes
outputs directly to their destination. As Triton's, it can be made slow for tests, by `parameters` of the model:

    creation_delay_sec              how long a load takes
    execute_delay_ms                how long an execution takes
    instance_wise_delay_multiplier  an execution of instance n takes n times as many delays, at least one
"""

from __future__ import annotations

import time
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
        self._delay_s = 0.0

    def load(self, arguments: ModelArguments) -> None:
        time.sleep(_number(arguments, "creation_delay_sec"))
        self._delay_s = _execution_delay_s(arguments)
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
        if self._delay_s:
            time.sleep(self._delay_s)
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


def _execution_delay_s(arguments: ModelArguments) -> float:
    multiplier = _number(arguments, "instance_wise_delay_multiplier")
    instance = int(arguments.instance_name.rpartition("_")[2]) if multiplier else 0  # named as `plan_instances` does
    return _number(arguments, "execute_delay_ms") / 1000 * max(1, multiplier * instance)


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
