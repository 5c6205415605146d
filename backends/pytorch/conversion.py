"""Converts between arrays and tensors of PyTorch, without copies where both can share memory.

Which datatypes of a configuration PyTorch has. Pure.

The table is that of Triton's pytorch backend (libtorch_utils.cc), with BF16, which Triton does not take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from shm.arrays import Array

#: Protocol name → the name of the type in the module `torch`.
TORCH_TYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}


def is_supported(datatype: str) -> bool:
    """Return whether a tensor of a model can have the datatype (a protocol name). BYTES are lists of strings."""
    return datatype in TORCH_TYPES or datatype == "BYTES"


class TensorConversion:
    """The conversions of one model."""

    def __init__(self, torch: Any, *, copies_read_only: bool) -> None:
        """`copies_read_only`: the model may change its inputs, so those in memory of clients are copied."""
        self._torch = torch
        self._copies_read_only = copies_read_only
        self._types = {name: getattr(torch, of_torch) for name, of_torch in TORCH_TYPES.items()}
        self._datatypes = {of_torch: name for name, of_torch in self._types.items()}

    def tensor(self, name: str, array: Array, datatype: str) -> Any:
        """Return an input as the model takes it: a tensor on the CPU in the array's memory, or a list of strings.

        BF16 are arrays of uint16. Raises `InvalidArgument` for a string that is not UTF-8.
        """
        if datatype == "BYTES":
            return _strings(name, array)
        if self._copies_read_only and not array.flags.writeable:
            array = array.copy()
        if datatype == "BF16":
            return self._torch.from_numpy(array.view(np.int16)).view(self._types["BF16"])
        return self._torch.from_numpy(array)

    def datatype(self, output: Any) -> str:
        """Return the protocol name of an output's datatype; INVALID if the protocols have none for it."""
        if isinstance(output, list):
            return "BYTES"
        return self._datatypes.get(output.dtype, "INVALID")

    def array(self, output: Any, datatype: str) -> Array:
        """Return an output as an array: in the memory of a contiguous tensor on the CPU, else copied.

        Strings are an object array of one dimension, BF16 are uint16.
        """
        if datatype == "BYTES":
            strings = np.empty(len(output), dtype=object)
            strings[:] = output
            return strings
        tensor = output.detach().resolve_neg().contiguous().cpu()
        is_bf16 = datatype == "BF16"
        array: Array = tensor.view(self._types["INT16"]).numpy().view(np.uint16) if is_bf16 else tensor.numpy()
        return array


def _strings(name: str, array: Array) -> list[str]:
    try:
        return [element.decode() for element in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' has a string that is not UTF-8: {error}") from error
