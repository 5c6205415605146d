"""What models that compute a batch at once share: its inputs are joined, and its outputs are divided.

A batch of one request uses its inputs in place. The inputs of several requests are copied once, into one contiguous
array. Clients do not send the inputs of a configuration's `batch_input`, which describe the parts of a ragged batch:
they are computed from the shapes of the requests. Each request gets its own rows of the outputs that it requested, or
is executed alone.
"""

from __future__ import annotations

import abc
import itertools
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from backends.reshape import input_array, output_array
from backends.worker.request import OutputValue
from backends.worker.sequence_config import all_inputs, all_outputs
from kernel.errors import BadConfig, InternalError, ServingError, Unsupported, request_prefix
from shm.arrays import NUMPY_TYPES
from shm.datatypes import BY_CONFIG_NAME, element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.base import Config, Timings
    from backends.reshape import TensorShapes
    from backends.worker.devices.instance_device import InstanceDevice
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array
    from shm.tensor import Tensor


def batch_sizes(requests: Sequence[WorkerRequest], max_batch_size: int) -> list[int]:
    """Return the rows of each request: the first dimension of its inputs, or 1 if the model does not batch.

    Raises `InternalError` if the sum exceeds `max_batch_size`; this is an error of the scheduler, not of a client.
    """
    sizes = [request.inputs[0].shape[0] if max_batch_size and request.inputs else 1 for request in requests]
    total = sum(sizes)
    if total > max(max_batch_size, 1):
        raise InternalError(f"batch size {total}, max allowed is {max_batch_size}")
    return sizes


def gather(requests: Sequence[WorkerRequest], specs: Mapping[str, TensorShapes]) -> dict[str, Array]:
    """Return name → array of the requests' inputs, in the model's shapes, with the rows of all requests in order.

    All requests must have the same inputs, with the same shapes except for the batch dimension and ragged inputs. An
    optional input that no request has is not in the result. Arrays of a batch of one request are views of the
    request's memory, and read-only if the memory belongs to a client. Raises `InternalError` or `InvalidArgument`.
    """
    if len(requests) == 1:
        arrays: dict[str, Array] = {}
        for view in requests[0].inputs:
            arrays[view.name] = _model_input(view, specs.get(view.name))
        return arrays
    names = [view.name for view in requests[0].inputs]
    for request in requests:
        if len(request.inputs) != len(names):
            raise InternalError("requests of one batch must have the same inputs")
    return {name: _concatenated(requests, name, specs) for name in names}


def _concatenated(requests: Sequence[WorkerRequest], name: str, specs: Mapping[str, TensorShapes]) -> Array:
    spec = specs.get(name)
    parts: list[Array] = []
    for request in requests:
        view = request.input(name)
        if view is None:
            raise InternalError(f"input '{name}' is missing in a request of a batch")
        parts.append(_model_input(view, spec))
    if any(part.shape[1:] != parts[0].shape[1:] for part in parts):
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise InternalError(f"input '{name}' has different shapes in requests of one batch: {shapes}")
    return np.concatenate(parts)


def _model_input(view: Tensor, spec: TensorShapes | None) -> Array:
    array = input_array(view, spec)
    return array.reshape(-1) if spec is not None and spec.ragged else array


KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)


class BatchInput(msgspec.Struct, frozen=True):
    """One entry of `batch_input`: the model's inputs `target_names` describe the shapes of `source_input`."""

    kind: str
    target_names: tuple[str, ...]
    datatype: str
    source_input: str


def batch_inputs_of(config: Mapping[str, Any]) -> list[BatchInput]:
    """Return the batch inputs of a model's configuration. Raises `BadConfig` for an unknown kind."""
    found = []
    for entry in config.get("batch_input", []):
        kind = str(entry.get("kind", KINDS[0]))
        if kind not in KINDS:
            raise BadConfig(f"unknown kind '{kind}' of batch input")
        datatype = BY_CONFIG_NAME[entry["data_type"]].name
        found.append(BatchInput(kind, tuple(entry["target_name"]), datatype, str(entry["source_input"][0])))
    return found


def batch_input_arrays(batch_inputs: Sequence[BatchInput], requests: Sequence[WorkerRequest]) -> dict[str, Array]:
    """Return model input → array. Raises `InternalError` if a request does not have the source input."""
    arrays = {}
    for batch_input in batch_inputs:
        shapes = [_source_shape(request, batch_input.source_input) for request in requests]
        array = _values(batch_input.kind, shapes).astype(NUMPY_TYPES[batch_input.datatype])
        arrays.update(dict.fromkeys(batch_input.target_names, array))
    return arrays


def _values(kind: str, shapes: Sequence[Sequence[int]]) -> Array:
    """Return the values of a batch input for requests whose source inputs have these `shapes`."""
    counts = [element_count(shape) for shape in shapes]
    if kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts)
    if kind == "BATCH_ACCUMULATED_ELEMENT_COUNT":
        return np.array(list(itertools.accumulate(counts)))
    if kind == "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
        return np.array(list(itertools.accumulate(counts, initial=0)))
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(max(counts))  # the model uses the shape; the elements have no meaning
    rows = np.array([shape[1:] for shape in shapes for _ in range(shape[0])])
    return rows if kind == "BATCH_ITEM_SHAPE" else rows.reshape(-1)


def _source_shape(request: WorkerRequest, name: str) -> list[int]:
    view = request.input(name)
    if view is None:
        raise InternalError(f"input '{name}' is missing; a batch input is computed from its shape")
    return view.shape


def requested_outputs(requests: Sequence[WorkerRequest], specs: Mapping[str, TensorShapes]) -> list[str]:
    """Return the names of the outputs that at least one request asks for."""
    for request in requests:
        if not request.ref.outputs:  # all outputs, the usual case: saves a call for each output
            return list(specs)
    return [name for name in specs if any(request.wants(name) for request in requests)]


def execute_alone(
    execute: Callable[[Sequence[WorkerRequest], Timings], None], requests: Sequence[WorkerRequest], timings: Timings
) -> None:
    """Execute each request of a batch that failed as a batch of its own, so that only those that are wrong fail."""
    for request in requests:
        try:
            execute([request], timings)
        except ServingError as error:  # noqa: PERF203 - few batches fail
            request.fail(error)


def scatter(
    requests: Sequence[WorkerRequest],
    sizes: Sequence[int],
    arrays: Mapping[str, Array],
    specs: Mapping[str, TensorShapes],
) -> None:
    """Respond to each request with its rows of `arrays`, in the shapes that clients see.

    `arrays` maps the names of outputs to arrays in the model's shapes; `sizes` are the rows of the requests. If an
    output has too few rows, the requests that miss rows fail with Triton's text. `arrays` may be changed after the
    call, because responding copies the rows.
    """
    # The begin of the next request's part of each output: a row, or an element of a flat output.
    starts = dict.fromkeys(arrays, 0)
    for request, size in zip(requests, sizes, strict=True):
        outputs: list[OutputValue] = []
        failure: ServingError | None = None
        for name, array in arrays.items():
            spec = specs[name]
            # The length of the request's part: rows, or elements of a flat output.
            length = size if spec.shaped_like is None else element_count(_shape_like_source(request, spec))
            start = starts[name]
            starts[name] = start + length
            if request.ref.outputs and not request.wants(name):
                continue
            try:
                outputs.append(OutputValue(name, spec.datatype, _part(request, array, start, length, spec)))
            except ServingError as error:
                failure = error
        if failure is None:
            request.respond(outputs)
        else:
            request.fail(failure)


def _part(request: WorkerRequest, array: Array, start: int, length: int, spec: TensorShapes) -> Array:
    """Return the request's part of an output, in the shape that clients see."""
    if not spec.batched and spec.shaped_like is None:
        return output_array(array, spec)
    end = start + length
    given = array.shape[0] if array.ndim else 0
    if given < end:
        raise Unsupported(
            f"{request_prefix(request.id)}failed to split the output tensor '{spec.name}' in responses: "
            f"expected batch size of atleast {end} in model output, got {given}"
        )
    # A whole array is passed on as the same object: so the worker knows that it is already at its destination.
    rows = array if length == given else array[start:end]
    if spec.shaped_like is not None:
        return rows.reshape(_shape_like_source(request, spec))
    return output_array(rows, spec)


def _shape_like_source(request: WorkerRequest, spec: TensorShapes) -> list[int]:
    """Return the shape of the request's part of a flat output: as configured, with variable dimensions of its source.

    The rule comes from Triton's `BackendOutputResponder`: dimension N of the output is dimension N of the input.
    """
    assert spec.shaped_like is not None
    source = request.input(spec.shaped_like)
    if source is None:
        raise InternalError(f"input '{spec.shaped_like}' is missing; it has the shape of output '{spec.name}'")
    given = source.shape
    dims = (-1, *spec.dims) if spec.batched else spec.dims
    if any(dim == -1 for dim in dims[len(given) :]):
        raise InternalError(
            f"output '{spec.name}' has more variable dimensions than input '{spec.shaped_like}' of shape {given}, "
            "from which they are taken (batch_output)"
        )
    return [given[index] if dim == -1 else dim for index, dim in enumerate(dims)]


class BatchModel(abc.ABC):
    """A loaded model that computes a batch at once, with the tensors of its configuration."""

    #: Whether the requests of a failed batch are executed again, each alone, so that only wrong ones fail.
    _tries_alone = True

    def __init__(self, config: Config, device: InstanceDevice | None) -> None:
        """`device` is the GPU on which the model computes."""
        self._device = device
        self._max_batch_size = int(config.get("max_batch_size", 0))
        self._inputs = all_inputs(config)
        self._outputs = all_outputs(config)
        self._batch_inputs = batch_inputs_of(config)
        self._datatypes = {name: spec.datatype for name, spec in self._inputs.items()}
        self._datatypes.update((name, each.datatype) for each in self._batch_inputs for name in each.target_names)
        self._string_inputs = {name for name, datatype in self._datatypes.items() if datatype == "BYTES"}

    @abc.abstractmethod
    def _infer(self, requests: Sequence[WorkerRequest], sizes: Sequence[int], timings: Timings) -> dict[str, Any]:
        """Return name → output of the batch, at least those that a request asks for; `sizes` are rows of requests.

        Raises `ServingError`.
        """

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Execute the requests and respond. Raises `ServingError` if a batch of one request fails."""
        try:
            sizes = batch_sizes(requests, self._max_batch_size)
            arrays = self._infer(requests, sizes, timings)
        except ServingError:
            if len(requests) == 1 or not self._tries_alone:
                raise
            if self._device is not None:
                self._device.keeps_outputs_in_order()  # the requests may have the same memory for outputs
            execute_alone(self.execute, requests, timings)
            return
        scatter(requests, sizes, arrays, self._outputs)

    def _gathered(self, requests: Sequence[WorkerRequest]) -> dict[str, Any]:
        """Return name → the rows of all requests: `DeviceArray` on a GPU, but arrays on the host for strings.

        Raises as `gather`.
        """
        computed = batch_input_arrays(self._batch_inputs, requests) if self._batch_inputs else {}
        device = self._device
        if device is None:
            arrays = gather(requests, self._inputs)
            arrays.update(computed)
            return arrays
        typed = {name: (self._datatypes[name], array) for name, array in computed.items()}
        found: dict[str, Any] = dict(device.gather(requests, self._inputs, computed=typed))
        if self._string_inputs:
            on_host = gather(requests, self._inputs)
            found.update((name, array) for name, array in on_host.items() if name in self._string_inputs)
        return found
