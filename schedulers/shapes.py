"""Which requests may share a batch. Pure.

Triton's rule: inputs with a variable dimension must have equal shapes; for a model with optional inputs, the requests
must have the same inputs.
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
        self._variable = frozenset(name for name, tensor in spec.inputs.items() if -1 in tensor.dims)
        self._optional = any(tensor.optional for tensor in spec.inputs.values())

    def key(self, request: Request) -> Hashable:
        """Return the key. The batch dimension is not part of it."""
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
