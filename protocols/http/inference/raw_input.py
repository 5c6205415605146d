"""Raw requests: the whole body is the model's only input, whose shape follows from its size. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument, request_prefix
from shm.datatypes import DATATYPES, element_count
from shm.strings import encode_strings
from shm.tensor import Tensor

if TYPE_CHECKING:
    from kernel.config.spec import ModelSpec

#: Raw requests cannot have an id.
_PREFIX = request_prefix("")


def decode_raw(body: bytes | bytearray | memoryview, spec: ModelSpec) -> Tensor:
    """Return `body` as the input of the model. A batch has one row. Raises `InvalidArgument`."""
    if len(spec.inputs) != 1:
        raise InvalidArgument(
            f"{_PREFIX}Raw request must only have 1 input (found 1) to be deduced but got {len(spec.inputs)} "
            f"inputs in '{spec.name}' model configuration"
        )
    (tensor,) = spec.inputs.values()
    shape = [1, *tensor.dims] if spec.max_batch_size > 0 else list(tensor.dims)
    variable = [place for place, dim in enumerate(shape) if dim == -1]
    if len(variable) > 1:
        raise InvalidArgument(
            f"{_PREFIX}The shape of the raw input '{tensor.name}' can not be deduced because there are more "
            "than one variable-sized dimension"
        )
    if tensor.datatype == "BYTES":
        if variable or element_count(shape) != 1:
            raise InvalidArgument(
                f"{_PREFIX}For BYTE datatype raw input '{tensor.name}', the model must have input shape [1]"
            )
        return Tensor(tensor.name, tensor.datatype, shape, encode_strings([bytes(body)]))
    row_byte_size = DATATYPES[tensor.datatype].byte_size * element_count(d for d in shape if d != -1)
    for place in variable:
        shape[place] = len(body) // row_byte_size
    expected = DATATYPES[tensor.datatype].byte_size * element_count(shape)
    if len(body) != expected:
        raise InvalidArgument(
            f"{_PREFIX}input byte size mismatch for input 'raw_input' for model '{spec.name}'. "
            f"Expected {expected}, got {len(body)}"
        )
    return Tensor(tensor.name, tensor.datatype, shape, body)
