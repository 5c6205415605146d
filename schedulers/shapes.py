"""Which requests may share a batch. Pure.

Triton's rule: inputs with a variable dimension must have equal shapes, unless the configuration allows them to be
ragged; shape tensors must be equal; for a model with optional inputs, the requests must have the same inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kernel.config.spec import ModelSpec
    from kernel.serving.request import Request


class BatchKeys:
    """Makes a key for each request. Requests with equal keys can share a batch."""

    def __init__(self, spec: ModelSpec) -> None:
        inputs = spec.inputs.items()
        self._variable = frozenset(n for n, tensor in inputs if -1 in tensor.dims and not tensor.allow_ragged_batch)
        self._shape_tensors = frozenset(name for name, tensor in inputs if tensor.is_shape_tensor)
        self._optional = any(tensor.optional for _, tensor in inputs)
        self._all_equal = not (self._variable or self._shape_tensors or self._optional)

    def key(self, request: Request) -> Hashable:
        """Return the key. The batch dimension is not part of it."""
        if self._all_equal:
            return None
        parts: list[tuple[str, tuple[int, ...], bytes | None]] = []
        for tensor in request.inputs:
            if tensor.name in self._shape_tensors:
                if tensor.data is None:  # its values are not in the message: too many for a shape
                    return object()
                parts.append((tensor.name, tuple(tensor.shape), bytes(tensor.data)))
            elif tensor.name in self._variable:
                parts.append((tensor.name, tuple(tensor.shape[1:]), None))
            elif self._optional:
                parts.append((tensor.name, (), None))
        if len(parts) > 1:
            parts.sort(key=_name)
        return tuple(parts)


def _name(part: tuple[str, tuple[int, ...], bytes | None]) -> str:
    return part[0]
