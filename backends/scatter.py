"""A batch's outputs back to its requests: to each its own rows of the outputs that it asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.reshape import output_array
from backends.worker.request import OutputValue
from kernel.errors import InternalError, ServingError, Unsupported, request_prefix
from shm.datatypes import element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.reshape import TensorShapes
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


def wanted_outputs(requests: Sequence[WorkerRequest], specs: Mapping[str, TensorShapes]) -> list[str]:
    """Return the names of the outputs that at least one of the requests asked for."""
    for request in requests:
        if not request.ref.outputs:  # most clients want all: so without a call for each output
            return list(specs)
    return [name for name in specs if any(request.wants(name) for request in requests)]


def scatter(
    requests: Sequence[WorkerRequest],
    sizes: Sequence[int],
    arrays: Mapping[str, Array],
    specs: Mapping[str, TensorShapes],
) -> None:
    """Answer each request with its rows of `arrays`, shaped as its client sees them.

    `sizes` are the requests' rows in order. Rows are views, copied when the request is answered. A request
    whose rows the model did not give fails with Triton's text; the others are answered.
    """
    # Where the next request's part of each output begins: a row, or an element of flat outputs.
    starts = dict.fromkeys(arrays, 0)
    for request, size in zip(requests, sizes, strict=True):
        outputs: list[OutputValue] = []
        failure: ServingError | None = None
        for name, array in arrays.items():
            spec = specs[name]
            # How many rows of the output, or elements of a flat one, are the request's.
            length = size if spec.shaped_like is None else element_count(_source_shape(request, spec))
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
    """Return the request's part of an output, as its client sees it."""
    if not spec.batched and spec.shaped_like is None:
        return output_array(array, spec)
    end = start + length
    given = array.shape[0] if array.ndim else 0
    if given < end:
        raise Unsupported(
            f"{request_prefix(request.id)}failed to split the output tensor '{spec.name}' in responses: "
            f"expected batch size of atleast {end} in model output, got {given}"
        )
    # A whole array keeps its identity, by which an output that is in its place already is known.
    rows = array if length == given else array[start:end]
    if spec.shaped_like is not None:
        return rows.reshape(_source_shape(request, spec))
    return output_array(rows, spec)


def _source_shape(request: WorkerRequest, spec: TensorShapes) -> list[int]:
    assert spec.shaped_like is not None
    source = request.input(spec.shaped_like)
    if source is None:
        raise InternalError(f"input '{spec.shaped_like}', that shapes output '{spec.name}', is missing")
    return source.shape
