"""Joins the inputs of a batch into one array per model input.

A batch of one request uses its inputs in place. The inputs of several requests are copied once, into one contiguous
array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.reshape import input_array
from kernel.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.reshape import TensorShapes
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
