"""The add_sub backend: OUTPUT0 is INPUT0 + INPUT1, OUTPUT1 is INPUT0 - INPUT1. An example of all steps and reports.

It has the three classes of a backend's life, joins the inputs of a batch, splits the outputs, and reports what the
statistics show. It can be made slow as the identity backend can.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from backends.base import CustomBackend, CustomInstance, CustomModel
from backends.batch_tensors import batch_sizes, gather, scatter
from backends.builtin.identity import Delays
from backends.reshape import tensor_specs
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Timings
    from backends.worker.request import WorkerRequest

_NUMBERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64")


class AddSubModel(CustomModel):
    """Two inputs and two outputs of one numeric datatype and shape."""

    def initialize(self) -> None:
        config, name = self.arguments.config, self.arguments.model_name
        self.inputs, self.outputs = tensor_specs(config, "input"), tensor_specs(config, "output")
        for kind, found in (("INPUT", self.inputs), ("OUTPUT", self.outputs)):
            if list(found) != [f"{kind}0", f"{kind}1"]:
                raise BadConfig(f"model '{name}' must have {kind}0 and {kind}1, got {', '.join(found) or 'none'}")
        tensors = [*self.inputs.values(), *self.outputs.values()]
        if len({(each.datatype, each.model_dims) for each in tensors}) != 1 or tensors[0].datatype not in _NUMBERS:
            raise BadConfig(f"all tensors of model '{name}' must have the same shape and the same numeric datatype")


class AddSubInstance(CustomInstance):
    """Adds and subtracts whole batches."""

    model: AddSubModel

    def initialize(self) -> None:
        self._delays = Delays(self.arguments)
        self._delays.create()

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        start_ns = time.monotonic_ns()
        sizes = batch_sizes(requests, self.arguments.max_batch_size)
        arrays = gather(requests, self.model.inputs)
        ready_ns = time.monotonic_ns()
        self._delays.execute()
        left, right = arrays["INPUT0"], arrays["INPUT1"]
        outputs = {"OUTPUT0": left + right, "OUTPUT1": left - right}
        inferred_ns = time.monotonic_ns()
        scatter(requests, sizes, outputs, self.model.outputs)
        times = (start_ns, ready_ns, inferred_ns, time.monotonic_ns())
        for request in requests:
            request.report(*times)
        timings.report_batch(sum(sizes), *times)


class AddSubBackend(CustomBackend):
    """Nothing is shared between its models."""

    model_class = AddSubModel
    instance_class = AddSubInstance
    shares_worker = True
