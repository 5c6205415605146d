"""Which models have trace settings of their own that a client may read and change: those that are ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument, ServingError

if TYPE_CHECKING:
    from kernel.serving.front_doors.interface import KernelInterface


def check_traced_model(kernel: KernelInterface, name: str) -> None:
    """Raise `InvalidArgument`, with Triton's text, unless a version of the model `name` is ready."""
    try:
        ready = kernel.model_ready(name)
    except ServingError:
        ready = False
    if not ready:
        raise InvalidArgument(f"Request for unknown model : {name}")
