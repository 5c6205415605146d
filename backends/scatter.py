"""Divides a batch into its requests: each gets its own rows of the outputs that it requested, or is executed alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.reshape import output_array
from backends.worker.request import OutputValue
from kernel.errors import InternalError, ServingError, Unsupported, request_prefix
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from backends.base import Timings
    from backends.reshape import TensorShapes
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


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

    The rule is that of Triton's `BackendOutputResponder`: dimension N of the output is dimension N of the input.
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
