"""A batch's inputs as one array per model input, with the least copying.

A lone request's inputs are used in place; those of several are copied once, into one contiguous array.
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
    """Return each request's rows: the first dimension of its inputs, or 1 where the model has no batches.

    Raises `InternalError` where they are more than the model takes: the scheduler's mistake, not a client's.
    """
    sizes = [request.inputs[0].shape[0] if max_batch_size and request.inputs else 1 for request in requests]
    total = sum(sizes)
    if total > max(max_batch_size, 1):
        raise InternalError(f"batch size {total}, max allowed is {max_batch_size}")
    return sizes


def gather(requests: Sequence[WorkerRequest], specs: Mapping[str, TensorShapes]) -> dict[str, Array]:
    """Return the inputs that the requests have, by name, with the rows of all requests in order.

    Arrays of a lone request are views of its memory and read-only where a client owns that. An optional
    input that no request has is left out. The requests must have the same inputs with the same shapes,
    batch dimension and ragged inputs aside.
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
    return {name: _joined(requests, name, specs) for name in names}


def _joined(requests: Sequence[WorkerRequest], name: str, specs: Mapping[str, TensorShapes]) -> Array:
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
