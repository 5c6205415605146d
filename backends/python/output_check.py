"""Compares the first outputs of a model with its configuration, so that the log can say what does not fit. Pure.

As Triton, the server sends outputs as the model made them, and leaves out those that the configuration does not have.
Then clients get what the metadata does not promise, or miss an output, and no error says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backends.python import datatypes
from shm.datatypes import BY_CONFIG_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from backends.python.tensors import Tensor

#: How many responses with outputs are compared. A model that is wrong is wrong at once; later responses cost nothing.
COMPARED_COUNT = 16

_NAMES = {number: name for name, number in datatypes.NUMBERS.items()}


class OutputCheck:
    """What the configuration says of the outputs, and which of them were reported."""

    __slots__ = ("_configured", "_left", "_names", "_reported", "_rows")

    def __init__(self, config: Mapping[str, Any], names: AbstractSet[str]) -> None:
        """`names` are those of all outputs that the configuration has, states included."""
        self._configured = {str(output["name"]): output for output in config.get("output", ())}
        self._names = names
        #: The batch dimension, if the model batches.
        self._rows = [-1] if int(config.get("max_batch_size", 0)) > 0 else []
        self._reported: set[str] = set()
        self._left = COMPARED_COUNT

    @property
    def done(self) -> bool:
        """Whether no more responses need to be compared."""
        return self._left <= 0

    def warnings(self, tensors: Sequence[Tensor]) -> list[str]:
        """Return a line for each tensor of a response that does not fit and was not reported before."""
        self._left -= bool(tensors)
        found = []
        for tensor in tensors:
            name = tensor.name()
            if name not in self._reported and (line := self._warning(name, tensor)):
                self._reported.add(name)
                found.append(line)
        return found

    def _warning(self, name: str, tensor: Tensor) -> str:
        if name not in self._names:
            there = ", ".join(f"'{each}'" for each in sorted(self._names)) or "none"
            return (
                f"output '{name}' is not in the configuration, which has {there}: no client gets it; add it "
                "to 'output' in config.pbtxt, or do not send it"
            )
        expected = self._configured.get(name, {})
        known = BY_CONFIG_NAME.get(str(expected.get("data_type", "")))
        if known is None:
            return ""
        datatype, sent = known.name, _NAMES[tensor.triton_dtype()]
        if datatype != sent:
            return (
                f"output '{name}' is {sent}, but its configuration and metadata say {datatype}: clients get "
                f"{sent}; change the model, or data_type in config.pbtxt"
            )
        dims = [*self._rows, *(int(dim) for dim in expected.get("dims", ()))]
        shape = tensor.shape()
        fits = len(dims) == len(shape) and all(dim in (-1, size) for dim, size in zip(dims, shape))
        if expected.get("reshape") is None and not fits:
            return (
                f"output '{name}' has shape {shape}, but its configuration and metadata say {dims}: clients "
                f"get {shape}; change the model, or dims in config.pbtxt"
            )
        return ""
