"""Converts arrays of a program that embeds the server to input tensors, and output tensors to arrays.

This is the only module of the kernel that imports NumPy. `kernel.embedding.requests` imports it with the first
request of a program; the server of the command line never imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernel.errors import InvalidArgument
from shm.arena import INLINE_LIMIT
from shm.arrays import NUMPY_TYPES, datatype_of, to_array, to_bytes
from shm.tensor import Tensor

if TYPE_CHECKING:
    from shm.arrays import Array

#: Python values without a datatype of their own. They are converted to the datatype of the model's input.
_PLAIN = (list, tuple, str, bytes, bool, int, float)


def input_tensor(name: str, value: Any, datatype: str | None) -> Tensor:
    """Return an input tensor with the elements and shape of `value`. Raises `InvalidArgument`.

    `datatype` is the model's for the input, None if the model has no input with this name. Lists and numbers are
    converted to it. Arrays, and other objects that NumPy converts to arrays, keep their own datatype; the kernel
    refuses a different one. If `datatype` is BF16, which NumPy lacks, all values are truncated to it.

    Up to `INLINE_LIMIT` bytes are copied. A larger tensor refers to the memory of `value`, which must not change
    until the request was submitted.
    """
    try:
        array = _bf16_bits(value) if datatype == "BF16" else _as_array(value, datatype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"input '{name}' is not an array of {datatype or 'one datatype'}: {error}") from error
    found = "BF16" if datatype == "BF16" else datatype_of(array)
    if found is None:
        raise InvalidArgument(f"input '{name}' is an array of {array.dtype}, for which tensors have no datatype")
    data = to_bytes(array)
    # The kernel copies a large tensor to the model's arena when it is submitted. It sends a small one later, so a
    # small one is copied here.
    return Tensor(name, found, list(array.shape), bytes(data) if len(data) <= INLINE_LIMIT else data)


def output_array(output: Tensor) -> Array:
    """Return a copy of an output in its shape; the caller owns it.

    BF16 becomes float32, BYTES becomes an object array of `bytes`.
    """
    data = output.raw()
    if output.datatype == "BF16":
        bits = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(output.shape)
    array = to_array(output.datatype, output.shape, data)
    return array if output.datatype == "BYTES" else array.copy()


def _as_array(value: Any, datatype: str | None) -> Array:
    if not isinstance(value, _PLAIN) or datatype is None:
        return np.asarray(value)
    dtype = NUMPY_TYPES[datatype]
    if dtype.kind in "iub" and (found := np.asarray(value)).dtype.kind == "f" and found.size:
        raise TypeError("it has fractions")  # NumPy would remove them without an error
    return np.asarray(value, dtype=dtype)


def _bf16_bits(value: Any) -> Array:
    """Return the upper 16 bits of each value as float32: this is the format of BF16."""
    array = np.asarray(value, dtype="<f4")
    return (np.frombuffer(array.tobytes(), dtype="<u4") >> 16).astype("<u2").reshape(array.shape)
