"""Shapes between models with and without batching, and between an ensemble and its steps. Pure.

The bytes of a tensor are the same with and without a batch dimension, so that only the shape changes. The rule is
Triton's (`ReshapeTensorDims` in core's ensemble_scheduler.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.serving.validation import fits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.config.spec import TensorSpec


def bridged(shape: list[int], *, batched: bool, dims: Sequence[int], batching: bool) -> list[int]:
    """Return the shape in which a consumer gets a tensor that was made with a batch dimension if `batched`.

    The consumer takes `dims`, after a batch dimension if `batching`.
    """
    if batched is batching:
        return shape
    if batching:
        # A model without batching made the tensor: either one row, or all rows as a part of its own dimensions.
        return [1, *shape] if fits(shape, dims) else shape
    if not fits(shape, dims) and shape and shape[0] == 1:
        return shape[1:]
    return shape


def inside(shape: list[int], spec: TensorSpec, *, batched: bool) -> list[int]:
    """Return the shape that the steps see of an input of the ensemble; it differs if the input has a `reshape`."""
    if spec.reshape is None:
        return shape
    return _converted(shape, spec.dims, spec.reshape, batched=batched)


def outside(shape: list[int], spec: TensorSpec, *, batched: bool) -> list[int]:
    """Return the shape that clients see of an output of the ensemble, the inverse of `inside`."""
    if spec.reshape is None:
        return shape
    return _converted(shape, spec.reshape, spec.dims, batched=batched)


def _converted(shape: list[int], source: Sequence[int], target: Sequence[int], *, batched: bool) -> list[int]:
    """Replace `source` by `target` after the batch dimension; each -1 is the size of the next -1 of `source`.

    A shape that does not have the configured number of dimensions is returned unchanged.
    """
    batch = shape[:1] if batched else []
    sizes = shape[len(batch) :]
    if len(sizes) != len(source):
        return shape
    variable = iter([size for size, dim in zip(sizes, source, strict=True) if dim == -1])
    return [*batch, *(next(variable, -1) if dim == -1 else dim for dim in target)]
