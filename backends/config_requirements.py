"""Checks that a model has exactly the tensors that its backend requires, in the required order. Pure.

Texts are those of Triton's repeat and square backends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InvalidArgument
from kernel.serving.validation import shape_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

_ORDINALS = ("first", "second", "third")


class ExpectedTensor(msgspec.Struct, frozen=True):
    """An input or output that a model must have."""

    name: str
    #: As in `TYPE_INT32`, without `TYPE_`.
    datatype: str
    #: None for one dimension of any size.
    dims: tuple[int, ...] | None = (1,)


def check_tensors(
    config: Mapping[str, Any], inputs: Sequence[ExpectedTensor], outputs: Sequence[ExpectedTensor]
) -> None:
    """Raise `InvalidArgument` unless the model has exactly these tensors, in this order."""
    for kind, expected in (("input", inputs), ("output", outputs)):
        count = len(config.get(kind, ()))
        if count != len(expected):
            raise InvalidArgument(f"expected {len(expected)} {kind}{'s'[: len(expected) > 1]}, got {count}")
    for kind, expected in (("input", inputs), ("output", outputs)):
        for ordinal, tensor, given in zip(_ORDINALS, expected, config[kind], strict=False):
            if given["name"] != tensor.name:
                raise InvalidArgument(f"expected {ordinal} {kind} tensor name to be {tensor.name}, got {given['name']}")
    pairs = [*_pairs(config, "input", inputs), *_pairs(config, "output", outputs)]
    for tensor, given in pairs:
        _check_dims(tensor, dims_of(given))
    for tensor, given in pairs:
        if given["data_type"] != f"TYPE_{tensor.datatype}":
            raise InvalidArgument(f"expected {tensor.name} datatype to be {tensor.datatype}, got {given['data_type']}")


def dims_of(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dimensions of a tensor in a configuration; protobuf's JSON writes them as strings."""
    return tuple(int(dim) for dim in tensor.get("dims", ()))


def _pairs(
    config: Mapping[str, Any], kind: str, expected: Sequence[ExpectedTensor]
) -> Iterator[tuple[ExpectedTensor, Mapping[str, Any]]]:
    return zip(expected, config[kind], strict=True)


def _check_dims(tensor: ExpectedTensor, dims: tuple[int, ...]) -> None:
    if tensor.dims is None:
        if len(dims) != 1:
            raise InvalidArgument(f"expected {tensor.name} shape to have one dimension, got {shape_text(dims)}")
    elif dims != tensor.dims:
        raise InvalidArgument(f"expected {tensor.name} shape to be {shape_text(tensor.dims)}, got {shape_text(dims)}")
