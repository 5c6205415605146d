"""A loaded ONNX model: gathers the inputs of a batch, runs the model, scatters the outputs.

It computes only requested outputs. A batch of one request is not copied: the model reads the request's memory, and
writes the outputs directly to their destinations. Small batches of tensors with fixed shapes are copied, which is
faster (`small_batches.py`); batches that do not meet its conditions take the general path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from backends.base import PreparedBatch
from backends.batch_tensors import (
    batch_input_arrays,
    batch_inputs_of,
    batch_sizes,
    execute_alone,
    gather,
    requested_outputs,
    scatter,
)
from backends.onnxruntime.small_batches import SmallBatches, can_be_small, has_fixed_shape
from backends.worker.sequence_config import all_inputs, all_outputs
from kernel.errors import ServingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config, Timings
    from backends.onnxruntime.binding import BoundSession
    from backends.onnxruntime.device_model import DeviceSession
    from backends.onnxruntime.signature import OnnxSignature
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


class LoadedModel:
    """A session, with the tensors of the model's configuration."""

    def __init__(self, config: Config, signature: OnnxSignature, session: BoundSession | DeviceSession) -> None:
        self._session = session
        self._max_batch_size = int(config.get("max_batch_size", 0))
        self._inputs = all_inputs(config)
        self._outputs = all_outputs(config)
        self._batch_inputs = batch_inputs_of(config)
        self._scalar_inputs = [
            name
            for name, tensor in {**signature.inputs, **signature.initializers}.items()
            if not tensor.dims and not tensor.any_rank
        ]
        #: Outputs whose shape, except for the batch dimension, is known before the run.
        self._fixed_shape_outputs = {
            name for name, spec in self._outputs.items() if signature.outputs[name].dims and has_fixed_shape(spec)
        }
        self._small = self._small_batches(signature)

    def _small_batches(self, signature: OnnxSignature) -> SmallBatches | None:
        """Return the fast path for small batches; None if a tensor has no fixed shape, or clients do not send it."""
        required = [spec for spec in self._inputs.values() if not spec.optional]
        outputs = list(self._outputs.values())
        complete = required and outputs and {spec.name for spec in required} == {*signature.inputs}
        session = self._session
        if not (session.on_cpu and complete):
            return None
        if not all(can_be_small(spec, signature) for spec in (*required, *outputs)):
            return None
        return SmallBatches(cast("BoundSession", session), required, outputs, self._max_batch_size)

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Execute the requests and respond. Raises `ServingError` if a batch of one request fails.

        After a failure of a larger batch, each request is run alone, so that only requests with wrong inputs fail.
        """
        small = self._small
        if small is not None and small.execute(requests, timings):
            return
        try:
            batch = self.prepare(requests, timings)
            batch.compute()
        except ServingError:
            if len(requests) == 1:
                raise
            execute_alone(self.execute, requests, timings)
            return
        if small is not None and small.failed:
            self._small = None  # the inputs were right, so the model file declares wrong output shapes
        batch.respond()

    def prepare(self, requests: Sequence[WorkerRequest], timings: Timings) -> OnnxBatch:
        """Gather the inputs of a batch that is computed later. Raises as `gather` and `batch_sizes`."""
        sizes = batch_sizes(requests, self._max_batch_size)
        inputs = self._gathered(requests)
        for name in self._scalar_inputs:
            if name in inputs:
                inputs[name] = inputs[name].reshape(())
        names = requested_outputs(requests, self._outputs)
        destinations = self._destinations(requests[0], sizes[0], names) if len(requests) == 1 else {}
        return OnnxBatch(self, requests, timings, sizes, inputs, names, destinations)

    def infer(self, inputs: dict[str, Any], names: Sequence[str], destinations: dict[str, Any]) -> dict[str, Array]:
        """Return the outputs called `names`. Raises as `BoundSession.run`."""
        arrays = self._session.run(inputs, names, destinations)
        for name, array in arrays.items():
            if not array.ndim:
                arrays[name] = self._with_configured_rank(name, array)
        return arrays

    def scatter(self, requests: Sequence[WorkerRequest], sizes: Sequence[int], arrays: dict[str, Array]) -> None:
        """Respond to each request with its rows of the outputs."""
        scatter(requests, sizes, arrays, self._outputs)

    def _gathered(self, requests: Sequence[WorkerRequest]) -> dict[str, Any]:
        """Return name → the rows of all requests. Raises as `gather`."""
        inputs = gather(requests, self._inputs)
        if self._batch_inputs:
            inputs.update(batch_input_arrays(self._batch_inputs, requests))
        return inputs

    def _with_configured_rank(self, name: str, array: Array) -> Array:
        """Return a scalar of the model in its configured shape of one element."""
        spec = self._outputs[name]
        return array if spec.batched else array.reshape(spec.model_dims)

    def _destinations(self, request: WorkerRequest, size: int, names: Sequence[str]) -> dict[str, Any]:
        """Return name → memory of the outputs that the model can write directly to their destination."""
        if not self._session.accepts_destinations:
            return {}
        destinations = {}
        for name in names:
            if name not in self._fixed_shape_outputs:
                continue
            spec = self._outputs[name]
            shape = (size, *spec.dims) if spec.batched else spec.dims
            destination = self._destination(request, name, shape)
            if destination is not None:
                destinations[name] = destination
        return destinations

    def _destination(self, request: WorkerRequest, name: str, shape: Sequence[int]) -> Any:
        """Return the final memory of an output, or None if the model cannot write it there."""
        destination = request.reserve(name, self._outputs[name].datatype, shape)
        usable = destination is not None and destination.size and destination.flags.aligned
        return destination if usable else None


class OnnxBatch(PreparedBatch):
    """A batch with its gathered inputs."""

    def __init__(
        self,
        model: LoadedModel,
        requests: Sequence[WorkerRequest],
        timings: Timings,
        sizes: Sequence[int],
        inputs: dict[str, Any],
        names: Sequence[str],
        destinations: dict[str, Any],
    ) -> None:
        """`sizes` are the rows of the requests, `names` the outputs to compute, `destinations` where they may go."""
        self._model = model
        self._requests = requests
        self._timings = timings
        self._sizes = sizes
        self._inputs = inputs
        self._names = names
        self._destinations = destinations
        self._arrays: dict[str, Array] = {}
        #: After a failure: each request as a batch of its own, or why it has failed.
        self._alone: list[OnnxBatch | ServingError] = []

    def compute(self) -> None:
        """Compute the outputs. Raises `ServingError`."""
        self._timings.inputs_ready()
        try:
            self._arrays = self._model.infer(self._inputs, self._names, self._destinations)
        finally:
            self._timings.inferred()

    def run(self) -> None:
        """See `PreparedBatch`. After a failure each request is computed alone, so that only wrong ones fail."""
        try:
            self.compute()
        except ServingError:
            if len(self._requests) == 1:
                raise
            self._alone = [self._computed_alone(request) for request in self._requests]

    def _computed_alone(self, request: WorkerRequest) -> OnnxBatch | ServingError:
        try:
            batch = self._model.prepare([request], self._timings)
            batch.compute()
        except ServingError as error:
            return error.with_traceback(None)  # the traceback refers to the inputs
        return batch

    def respond(self) -> None:
        if not self._alone:
            self._model.scatter(self._requests, self._sizes, self._arrays)
            return
        for request, batch in zip(self._requests, self._alone, strict=True):
            if isinstance(batch, ServingError):
                request.fail(batch)
            else:
                batch.respond()
