"""A loaded ONNX model: gathers the inputs of a batch, runs the model, scatters the outputs.

It computes only requested outputs. A batch of one request is not copied: the model reads the request's memory, and
writes the outputs directly to their destinations. Small batches of tensors with fixed shapes are copied, which is
faster (`small_batches.py`); batches that do not meet its conditions take the general path. On a GPU batches are
gathered there, and outputs stay there until they are sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from backends.base import PreparedBatch
from backends.batch_tensors import BatchModel, batch_sizes, requested_outputs, scatter
from backends.onnxruntime.small_batches import SmallBatches, can_be_small, has_fixed_shape
from kernel.errors import ServingError
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config, Timings
    from backends.onnxruntime.binding import BoundSession
    from backends.onnxruntime.device_session import DeviceSession
    from backends.onnxruntime.signature import OnnxSignature
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


class LoadedModel(BatchModel):
    """A session, with the tensors of the model's configuration."""

    def __init__(
        self,
        config: Config,
        signature: OnnxSignature,
        session: BoundSession | DeviceSession,
        device: InstanceDevice | None = None,
    ) -> None:
        super().__init__(config, device)
        self._session = session
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
        """As `BatchModel.execute`."""
        if self._small is None or not self._small.execute(requests, timings):
            super().execute(requests, timings)

    def _infer(self, requests: Sequence[WorkerRequest], sizes: Sequence[int], timings: Timings) -> dict[str, Array]:
        batch = self._prepared(requests, sizes, timings)
        batch.compute()
        if self._small is not None and self._small.failed:
            self._small = None  # the inputs were right, so the model file declares wrong output shapes
        return batch.arrays

    def prepare(self, requests: Sequence[WorkerRequest], timings: Timings) -> OnnxBatch:
        """Gather the inputs of a batch that is computed later. Raises as `gather` and `batch_sizes`."""
        return self._prepared(requests, batch_sizes(requests, self._max_batch_size), timings)

    def _prepared(self, requests: Sequence[WorkerRequest], sizes: Sequence[int], timings: Timings) -> OnnxBatch:
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
        datatype = self._outputs[name].datatype
        if self._device is not None:
            return self._device.reserve(request, name, datatype, shape) if element_count(shape) else None
        destination = request.reserve(name, datatype, shape)
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
        self.arrays: dict[str, Array] = {}
        #: After a failure: each request as a batch of its own, or why it has failed.
        self._alone: list[OnnxBatch | ServingError] = []

    def compute(self) -> None:
        """Compute the outputs. Raises `ServingError`."""
        self._timings.inputs_ready()
        try:
            self.arrays = self._model.infer(self._inputs, self._names, self._destinations)
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
            self._model.scatter(self._requests, self._sizes, self.arrays)
            return
        for request, batch in zip(self._requests, self._alone, strict=True):
            if isinstance(batch, ServingError):
                request.fail(batch)
            else:
                batch.respond()
