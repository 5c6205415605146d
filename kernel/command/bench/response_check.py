"""Whether a response is what the metadata of its model says. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shm.datatypes import DATATYPES, element_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.command.bench.target import FoundOutput


def wrong_response(outputs: Sequence[FoundOutput], metadata: Mapping[str, Any]) -> str:
    """Return what is wrong with the outputs of a response, or nothing.

    Outputs without a datatype are known by their names alone. A server that describes no outputs may send any.
    """
    known = {each["name"]: each for each in metadata["outputs"]}
    if not known:
        return ""
    if not outputs:
        return "it has no outputs"
    for output in outputs:
        expected = known.get(output.name)
        if expected is None:
            return f"it has an output '{output.name}', and the model has {', '.join(known)}"
        if not output.datatype:
            continue
        if output.datatype != expected["datatype"]:
            return f"output '{output.name}' is {output.datatype}, and not {expected['datatype']}"
        dims = [int(dim) for dim in expected["shape"]]
        # Triton's FIL backend, and ours, leave dimensions of 1 out of what a row has.
        without_ones = [*dims[:1], *(dim for dim in dims[1:] if dim != 1)]
        if not (_fits(output.shape, dims) or _fits(output.shape, without_ones)):
            return f"output '{output.name}' has shape {output.shape}, and not {dims}, where -1 is any size"
        row = DATATYPES.get(output.datatype)
        if row and row.byte_size and output.byte_size is not None:
            size = element_count(output.shape) * row.byte_size
            if output.byte_size != size:
                return f"output '{output.name}' has {output.byte_size} bytes, and its shape {output.shape} takes {size}"
    return ""


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(dims) == len(shape) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))
