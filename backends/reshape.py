"""What a configuration says about each tensor, and the two shapes that it may have.

With `reshape` the client sees `dims` and the model sees `reshape.shape`. The kernel leaves tensors as
the client shaped them, so each backend asks here, with a `TensorShapes` that it made once when it loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, InvalidArgument
from shm.arrays import to_array
from shm.datatypes import BY_CONFIG_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shm.arrays import Array
    from shm.tensor import Tensor


class TensorShapes(msgspec.Struct, frozen=True):
    """One input or output of a model's configuration. Dimensions are without the batch's, -1 is variable."""

    name: str
    datatype: str
    #: What clients see.
    dims: tuple[int, ...]
    #: What the model sees, where that differs.
    reshape: tuple[int, ...] | None = None
    #: Whether a batch dimension stands in front of both.
    batched: bool = False
    optional: bool = False
    #: Requests of one batch may differ in shape; the model gets all elements in a row.
    ragged: bool = False
    #: An output that the model gives as all elements in a row: to each request as many, in the shape of
    #: this input of its own (`BATCH_SCATTER_WITH_INPUT_SHAPE`).
    shaped_like: str | None = None

    @property
    def model_dims(self) -> tuple[int, ...]:
        """The dimensions that the model sees, without the batch dimension."""
        return self.dims if self.reshape is None else self.reshape

    def model_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape, batch dimension included, that the model sees for the client's `shape`."""
        if self.reshape is None:
            return list(shape)
        return _carry_over(shape, self.dims, self.reshape, self.batched)

    def client_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape, batch dimension included, that clients see for the model's `shape`.

        Raises ValueError where `shape` has another number of dimensions than the configuration says.
        """
        if self.reshape is None:
            return list(shape)
        return _carry_over(shape, self.reshape, self.dims, self.batched)


def _carry_over(shape: Sequence[int], source: Sequence[int], target: Sequence[int], batched: bool) -> list[int]:
    """Return `target` with its variable dimensions taken, in order, from those of `shape` under `source`."""
    batch = list(shape[:1]) if batched else []
    variable = iter([size for size, dim in zip(shape[len(batch) :], source, strict=True) if dim == -1])
    return [*batch, *(next(variable) if dim == -1 else dim for dim in target)]


def tensor_specs(config: Mapping[str, Any], key: str) -> dict[str, TensorShapes]:
    """Return the tensors under `key` of a model's configuration, `input` or `output`, in their order."""
    batched = int(config.get("max_batch_size", 0)) > 0
    sources = {
        target: str(batch_output["source_input"][0])
        for batch_output in config.get("batch_output", [])
        for target in batch_output.get("target_name", [])
    }
    return {
        entry["name"]: _spec_of(entry, batched, sources.get(entry["name"]) if key == "output" else None)
        for entry in config.get(key, [])
    }


def _spec_of(entry: Mapping[str, Any], batched: bool, shaped_like: str | None) -> TensorShapes:
    reshape = entry.get("reshape")
    return TensorShapes(
        name=entry["name"],
        datatype=BY_CONFIG_NAME[entry["data_type"]].name,
        dims=_integers(entry.get("dims", [])),
        reshape=None if reshape is None else _integers(reshape.get("shape", [])),
        batched=batched,
        optional=bool(entry.get("optional", False)),
        ragged=bool(entry.get("allow_ragged_batch", False)),
        shaped_like=shaped_like,
    )


def _integers(values: Iterable[int | str]) -> tuple[int, ...]:
    """Protobuf's JSON writes 64-bit integers as strings."""
    return tuple(int(value) for value in values)


def input_array(view: Tensor, spec: TensorShapes | None) -> Array:
    """Return an input as the model sees it: a view in place, except for BYTES and misaligned memory.

    BF16, that numpy lacks, becomes uint16. Inputs that the configuration does not list among its inputs,
    such as the controls of a sequence, have no `spec` and keep their shape.
    """
    datatype = "UINT16" if view.datatype == "BF16" else view.datatype
    try:
        shape = view.shape if spec is None or spec.reshape is None else spec.model_shape(view.shape)
        array = to_array(datatype, shape, view.raw())
    except ValueError as error:
        raise InvalidArgument(f"input '{view.name}' does not hold a tensor of shape {view.shape}: {error}") from error
    # Vector instructions of a model may fault on an element that straddles its natural boundary.
    return array if array.flags.aligned else array.copy()


def output_array(array: Array, spec: TensorShapes) -> Array:
    """Return an output as clients see it, a view of the model's `array`."""
    if spec.reshape is None:
        return array
    try:
        return array.reshape(spec.client_shape(array.shape))
    except ValueError as error:
        raise InternalError(
            f"output '{spec.name}' of shape {list(array.shape)} cannot be reshaped to "
            f"{list(spec.dims)} as the model configuration asks for"
        ) from error
