"""Backend name of a model configuration → class. Others come from installed packages.

A package adds a backend by an entry point of the group `naiad.backends`, whose name is the one that
model configurations use. Classes are imported in the worker, when a model asks for them.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from backends.base import Backend

ENTRY_POINT_GROUP = "naiad.backends"

BUILT_IN = {
    "identity": "backends.identity:IdentityBackend",
    "onnxruntime": "backends.onnxruntime.backend:OnnxRuntimeBackend",
    "python": "backends.python.backend:PythonBackend",
}


def backend_class(name: str) -> type[Backend]:
    """Return the class of the backend called `name`. Raises `InvalidArgument` for unknown names."""
    target = BUILT_IN.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        found: type[Backend] = getattr(importlib.import_module(module), attribute)
        return found
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        loaded: type[Backend] = entry_point.load()
        return loaded
    known = ", ".join(sorted(BUILT_IN))
    raise InvalidArgument(
        f"unable to find backend '{name}'. Built in are {known}; packages add others by entry points of the "
        f"group '{ENTRY_POINT_GROUP}'"
    )
