"""Which datatypes of a configuration PyTorch has. Pure.

The table is that of Triton's pytorch backend (libtorch_utils.cc), with BF16, which Triton does not take.
"""

from __future__ import annotations

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
