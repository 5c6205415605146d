"""Arrays of a program that embeds the server as tensors of its requests, and tensors of responses as arrays.

The one module of the kernel that imports NumPy. `kernel/embedding/requests.py` asks for it with the first request of a
program: the server of the command line never does.
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

#: Values of Python itself, which have no datatype of their own and get the model's.
_PLAIN = (list, tuple, str, bytes, bool, int, float)


def input_tensor(name: str, value: Any, datatype: str | None) -> Tensor:
    """Return an input that holds `value`, which may be changed once its request was submitted.

    `datatype` is that of the model's input, None where it has none of this name. Lists and numbers become it; an
    array, or what NumPy can read as one, keeps its own, and the kernel refuses it where that is another. For
    BF16, that NumPy lacks, values are cut to it. Raises `InvalidArgument`.
    """
    try:
        array = _bf16_bits(value) if datatype == "BF16" else _as_array(value, datatype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"input '{name}' is no array of {datatype or 'one datatype'}: {error}") from error
    found = "BF16" if datatype == "BF16" else datatype_of(array)
    if found is None:
        raise InvalidArgument(f"input '{name}' is an array of {array.dtype}, which no datatype of tensors stands for")
    data = to_bytes(array)
    # Large ones are copied to the model's arena when they are submitted; these, only when they are sent.
    return Tensor(name, found, list(array.shape), bytes(data) if len(data) <= INLINE_LIMIT else data)


def output_array(output: Tensor) -> Array:
    """Return a copy of an output, the caller's own. BF16 becomes float32, BYTES an object array of `bytes`."""
    data = output.raw()
    if output.datatype == "BF16":
        bits = np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(output.shape)
    array = to_array(output.datatype, output.shape, data)
    return array if output.datatype == "BYTES" else array.copy()


def _as_array(value: Any, datatype: str | None) -> Array:
    if not isinstance(value, _PLAIN) or datatype is None:
        return np.asarray(value)
    wanted = NUMPY_TYPES[datatype]
    if wanted.kind in "iub" and (found := np.asarray(value)).dtype.kind == "f" and found.size:
        raise TypeError("it has fractions")  # which NumPy would cut off
    return np.asarray(value, dtype=wanted)


def _bf16_bits(value: Any) -> Array:
    """Return the upper halves of the values as float32, which is what BF16 is."""
    array = np.asarray(value, dtype="<f4")
    return (np.frombuffer(array.tobytes(), dtype="<u4") >> 16).astype("<u2").reshape(array.shape)
