"""Finds the class of a backend by its name in model configurations.

An installed package adds a backend with an entry point of the group `naiad.backends`; the entry point has the name
of the backend. A worker imports only the class of its own model's backend.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

    from backends.base import Backend

ENTRY_POINT_GROUP = "naiad.backends"

BUILT_IN = {
    "identity": "backends.builtin.identity:IdentityBackend",
    "onnxruntime": "backends.onnxruntime.backend:OnnxRuntimeBackend",
    "python": "backends.python.backend:PythonBackend",
    "repeat": "backends.builtin.repeat:RepeatBackend",
    "square": "backends.builtin.square:SquareBackend",
}


def known_backends() -> dict[str, str]:
    """Return name → `module:Class` of all backends, without importing them."""
    found = {entry_point.name: entry_point.value for entry_point in _entry_points()}
    return {**found, **BUILT_IN}


def backend_class(name: str) -> type[Backend]:
    """Import and return the class of the backend called `name`.

    Raises `InvalidArgument` with Triton's text for an unknown name; the log of the kernel has a hint beside it.
    """
    target = BUILT_IN.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
        return found
    for entry_point in _entry_points().select(name=name):
        loaded: type[Backend] = entry_point.load()
        return loaded
    raise InvalidArgument(
        f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
    )


def _entry_points() -> EntryPoints:
    """Return the entry points of backends. The module is imported late: most workers and servers do without it."""
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)
