"""`TensorShapes`: the configuration of a tensor, and the conversion between the client's and the model's shape.

With `reshape` in the configuration, clients see `dims` and the model sees `reshape.shape`. The kernel passes tensors on
in the client's shape. Backends create the `TensorShapes` when they load, and convert the shapes with them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.errors import InternalError, InvalidArgument
from shm.arrays import to_array
from shm.datatypes import BY_CONFIG_NAME, DATATYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shm.arrays import Array
    from shm.tensor import Tensor

#: An empty string is its length alone.
_EMPTY_STRING_BYTE_SIZE = 4


class TensorShapes(msgspec.Struct, frozen=True):
    """One input or output, `name`, of a model's configuration.

    Dimensions are without the batch dimension; -1 is any size.
    """

    name: str
    #: Protocol name, such as `FP32`.
    datatype: str
    #: The dimensions that clients see.
    dims: tuple[int, ...]
    #: The dimensions that the model sees; None if they are `dims`.
    reshape: tuple[int, ...] | None = None
    #: Whether the client's and the model's shape begin with a batch dimension.
    batched: bool = False
    #: Whether a request may leave the input out.
    optional: bool = False
    #: Requests of a batch may have different shapes. The model gets the elements of all requests in one dimension.
    ragged: bool = False
    #: For an output that the model returns in one dimension: the name of the input that has the shape of each request's
    #: part (`BATCH_SCATTER_WITH_INPUT_SHAPE`).
    shaped_like: str | None = None

    @property
    def model_dims(self) -> tuple[int, ...]:
        """The dimensions that the model sees, without the batch dimension."""
        return self.dims if self.reshape is None else self.reshape

    def model_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the model's shape for the client's `shape`. Both include the batch dimension.

        Raises `ValueError` if `shape` does not have the configured number of dimensions.
        """
        if self.reshape is None:
            return list(shape)
        return _converted(shape, self.dims, self.reshape, self.batched)

    def client_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the client's shape for the model's `shape`. Both include the batch dimension.

        Raises `ValueError` if `shape` does not have the configured number of dimensions.
        """
        if self.reshape is None:
            return list(shape)
        return _converted(shape, self.reshape, self.dims, self.batched)


def _converted(shape: Sequence[int], source: Sequence[int], target: Sequence[int], batched: bool) -> list[int]:
    """Return `target` after the batch dimension; each -1 is replaced by the size of the next -1 of `source`."""
    batch = list(shape[:1]) if batched else []
    if len(shape) - len(batch) != len(source):
        raise ValueError(f"{len(shape)} dimensions, expected {len(batch) + len(source)}")
    variable = iter([size for size, dim in zip(shape[len(batch) :], source) if dim == -1])
    return [*batch, *(next(variable) if dim == -1 else dim for dim in target)]


def tensor_specs(config: Mapping[str, Any], key: str) -> dict[str, TensorShapes]:
    """Return name → tensor under `key` (`input` or `output`) of a model's configuration, in its order."""
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
    # Protobuf's JSON writes 64-bit integers as strings.
    return tuple(int(value) for value in values)


def input_array(view: Tensor, spec: TensorShapes | None) -> Array:
    """Return an input in the model's shape: a view of its memory, but a copy for BYTES and misaligned memory.

    BF16, which NumPy lacks, becomes uint16. `spec` is None for inputs that are not under `input` in the configuration,
    such as control tensors; they keep their shape. Raises `InvalidArgument` if the data does not fit the shape.
    """
    datatype = "UINT16" if view.datatype == "BF16" else view.datatype
    try:
        shape = view.shape if spec is None or spec.reshape is None else spec.model_shape(view.shape)
        array = to_array(datatype, shape, view.raw())
    except ValueError as error:
        raise InvalidArgument(f"input '{view.name}' does not hold a tensor of shape {view.shape}: {error}") from error
    # A model's vector instructions may crash on misaligned elements.
    return array if array.flags.aligned else array.copy()


def zeros(spec: TensorShapes, inputs: Sequence[Tensor]) -> Array:
    """Return zeros in place of an input that a request with these `inputs` omits, in the model's shape.

    There are as many rows as in the request's other inputs. Where any size is allowed, it is 1.
    """
    shape = [1 if dim < 0 else dim for dim in spec.model_dims]
    if spec.batched:
        shape.insert(0, inputs[0].shape[0] if inputs else 1)
    byte_size = DATATYPES[spec.datatype].byte_size or _EMPTY_STRING_BYTE_SIZE
    return to_array("UINT16" if spec.datatype == "BF16" else spec.datatype, shape, bytes(math.prod(shape) * byte_size))


def output_array(array: Array, spec: TensorShapes) -> Array:
    """Return an output in the client's shape, a view of the model's `array`. Raises `InternalError`."""
    if spec.reshape is None:
        return array
    try:
        return array.reshape(spec.client_shape(array.shape))
    except ValueError as error:
        raise InternalError(
            f"output '{spec.name}' of shape {list(array.shape)} cannot be reshaped to "
            f"{list(spec.dims)} as the model configuration requires"
        ) from error
