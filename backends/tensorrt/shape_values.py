"""The values of a shape tensor for a batch: integers that say shapes, which TensorRT reads on the host. Pure.

Rules and texts are those of Triton's TensorRT backend: the scheduler puts only requests with equal values into one
batch, and if the model batches, the first value is the number of rows of the whole batch, which requests may leave out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernel.errors import InternalError, InvalidArgument
from shm.arrays import NUMPY_TYPES

if TYPE_CHECKING:
    from backends.tensorrt.signature import EngineTensor
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


def shape_values(request: WorkerRequest, name: str, tensor: EngineTensor, row_count: int, batched: bool) -> Array:
    """Return the values for a batch of `row_count` rows whose first request is `request`, in the engine's shape.

    Raises `InvalidArgument` for a wrong number of values, `InternalError` if there are none.
    """
    view = request.input(name)
    if view is None:
        raise InternalError(f"unable to find shape values for shape input '{name}' in request")
    data = view.raw()
    dtype = NUMPY_TYPES[tensor.datatype]
    expected = tensor.dims[0] if tensor.dims and tensor.dims[0] >= 0 else None
    given = np.frombuffer(data, dtype) if len(data) % dtype.itemsize == 0 else None
    if given is not None and batched and len(view.shape) > 1 and view.shape[0]:
        given = given[: len(given) // view.shape[0]]  # each row has the values
    if given is not None and batched and (expected is None or len(given) == expected - 1):
        given = np.concatenate([np.array([row_count], dtype), given])
    elif given is not None and batched and len(given) == expected:
        given = np.concatenate([np.array([row_count], dtype), given[1:]])
    if given is None or (expected is not None and len(given) != expected):
        count = 1 if expected is None else expected - int(batched)
        more = f" [ or {(count + 1) * dtype.itemsize} if input includes batch shape value] " if batched else ""
        raise InvalidArgument(
            f"shape tensor for input '{name}' expected byte size is {count * dtype.itemsize}{more}, got {len(data)}"
        )
    array: Array = given.copy()
    return array.reshape(()) if not tensor.dims else array
