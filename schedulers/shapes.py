"""Which requests may share a batch. Pure.

Triton's rule: shapes must be equal for inputs with a variable dimension, and where the model has
optional inputs, the same inputs must be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kernel.config.spec import ModelSpec
    from kernel.serving.request import Request


class BatchKeys:
    """Makes a key per request; requests with equal keys can be batched."""

    def __init__(self, spec: ModelSpec) -> None:
        self._variable = frozenset(name for name, tensor in spec.inputs.items() if -1 in tensor.dims)
        self._optional = any(tensor.optional for tensor in spec.inputs.values())

    def key(self, request: Request) -> Hashable:
        """Return the key; the batch dimension does not count."""
        if not self._variable and not self._optional:
            return None
        parts: list[tuple[str, tuple[int, ...]]] = []
        for tensor in request.inputs:
            if tensor.name in self._variable:
                parts.append((tensor.name, tuple(tensor.shape[1:])))
            elif self._optional:
                parts.append((tensor.name, ()))
        parts.sort()
        return tuple(parts)
