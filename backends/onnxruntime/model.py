"""A loaded ONNX model: batches gathered, run and scattered.

Only outputs that a request asked for are computed. A lone request is computed without a copy: on its
own memory, and into the memory where its outputs are expected. Small batches of tensors with known shapes
are copied, which costs less (`small.py`); what these cannot serve is served as all others are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.batch_input import batch_input_arrays, batch_inputs_of
from backends.gather import batch_sizes, gather
from backends.onnxruntime.small import SmallBatches, can_be_small, has_known_shape
from backends.reshape import tensor_specs
from backends.scatter import scatter, wanted_outputs
from kernel.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config, Timings
    from backends.onnxruntime.binding import BoundSession
    from backends.onnxruntime.tensors import OnnxSignature
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


class LoadedModel:
    """A session with what its model's configuration says about tensors."""

    def __init__(self, config: Config, signature: OnnxSignature, session: BoundSession) -> None:
        self._session = session
        self._max_batch_size = int(config.get("max_batch_size", 0))
        self._inputs = tensor_specs(config, "input")
        self._outputs = tensor_specs(config, "output")
        self._batch_inputs = batch_inputs_of(config)
        self._scalar_inputs = [
            name for name, tensor in {**signature.inputs, **signature.initializers}.items() if not tensor.dims
        ]
        #: Outputs whose shape is known before they are computed, but for the batch dimension.
        self._placeable = {
            name for name, spec in self._outputs.items() if signature.outputs[name].dims and has_known_shape(spec)
        }
        self._small = self._small_batches(signature)

    def _small_batches(self, signature: OnnxSignature) -> SmallBatches | None:
        """Return what serves small batches; None where a tensor has no one shape, or is none that a client sends."""
        required = [spec for spec in self._inputs.values() if not spec.optional]
        outputs = list(self._outputs.values())
        complete = required and outputs and {spec.name for spec in required} == {*signature.inputs}
        if not (self._session.on_cpu and complete):
            return None
        if not all(can_be_small(spec, signature) for spec in (*required, *outputs)):
            return None
        return SmallBatches(self._session, required, outputs, self._max_batch_size)

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Answer the requests. Raises `ServingError` where a lone one fails.

        A batch that fails is run again request by request, so that nobody pays for another's input.
        """
        small = self._small
        if small is not None and small.execute(requests, timings):
            return
        sizes = batch_sizes(requests, self._max_batch_size)
        try:
            arrays = self._infer(requests, sizes, timings)
        except ServingError:
            if len(requests) == 1:
                raise
            for request in requests:
                self._execute_alone(request, timings)
            return
        if small is not None and small.failed:
            self._small = None  # not for the inputs: the file declares wrong shapes
        scatter(requests, sizes, arrays, self._outputs)

    def _execute_alone(self, request: WorkerRequest, timings: Timings) -> None:
        try:
            self.execute([request], timings)
        except ServingError as error:
            request.fail(error)

    def _infer(self, requests: Sequence[WorkerRequest], sizes: Sequence[int], timings: Timings) -> dict[str, Array]:
        inputs = gather(requests, self._inputs)
        if self._batch_inputs:
            inputs.update(batch_input_arrays(self._batch_inputs, requests))
        for name in self._scalar_inputs:
            if name in inputs:
                inputs[name] = inputs[name].reshape(())
        names = wanted_outputs(requests, self._outputs)
        places = self._places(requests[0], sizes[0], names) if len(requests) == 1 else {}
        timings.inputs_ready()
        try:
            arrays = self._session.run(inputs, names, places)
        finally:
            timings.inferred()
        for name, array in arrays.items():
            if not array.ndim:
                arrays[name] = self._with_configured_rank(name, array)
        return arrays

    def _with_configured_rank(self, name: str, array: Array) -> Array:
        """Return a model's scalar in the shape of one element that the configuration has for it."""
        spec = self._outputs[name]
        return array if spec.batched else array.reshape(spec.model_dims)

    def _places(self, request: WorkerRequest, size: int, names: Sequence[str]) -> dict[str, Array]:
        """Return the memory for those of the request's outputs that can be written there directly."""
        if not self._session.takes_places:
            return {}
        places = {}
        for name in names:
            if name not in self._placeable:
                continue
            spec = self._outputs[name]
            shape = (size, *spec.dims) if spec.batched else spec.dims
            place = request.reserve(name, spec.datatype, shape)
            if place is not None and place.size and place.flags.aligned:
                places[name] = place
        return places
