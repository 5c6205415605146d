"""Finds the class of a backend by its name in model configurations.

A file beside the model or in --backend-directory is a backend (`backends/backend_file.py`). An installed package adds
one with an entry point of the group `naiad.backends`; the entry point has the name of the backend. A worker imports
only the class of its own model's backend.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from backends.backend_file import (
    DIRECTORY_SETTING,
    PYTHON_BASED_FILE,
    find_backend_file,
    folder_backends,
    import_backend_file,
)
from backends.entry_points import entry_points_of
from backends.lifecycle import as_backend
from kernel.errors import InvalidArgument
from kernel.naiad_module import make_importable

if TYPE_CHECKING:
    from backends.base import Backend, ModelArguments

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "naiad.backends"

BUILT_IN = {
    "add_sub": "backends.builtin.add_sub:AddSubBackend",
    "fil": "backends.fil.backend:FilBackend",
    "identity": "backends.builtin.identity:IdentityBackend",
    "onnxruntime": "backends.onnxruntime.backend:OnnxRuntimeBackend",
    "python": "backends.python.backend:PythonBackend",
    "pytorch": "backends.pytorch.backend:PyTorchBackend",
    "repeat": "backends.builtin.repeat:RepeatBackend",
    "sklearn": "backends.sklearn.backend:SklearnBackend",
    "square": "backends.builtin.square:SquareBackend",
    "tensorrt": "backends.tensorrt.backend:TensorRtBackend",
}

#: Those of them that are there to be copied. A shop may have a backend of its own with such a name in
#: --backend-directory, which then is the one that is meant.
EXAMPLES = frozenset({"add_sub", "identity", "repeat", "square"})

#: What makes the class of a Python-based backend from its file.
PYTHON_BASED = "backends.python.python_based:python_based"


def known_backends(directory: Path | None = None) -> dict[str, str]:
    """Return name → `module:Class`, or file, of all backends, without importing them.

    `directory` is that of --backend-directory. Files beside models are not among them.
    """
    found = {entry_point.name: entry_point.value for entry_point in entry_points_of(ENTRY_POINT_GROUP)}
    of_folder = folder_backends(directory)
    ours = {name: target for name, target in BUILT_IN.items() if name not in EXAMPLES or name not in of_folder}
    return {**found, **of_folder, **ours}


def backend_class(name: str, arguments: ModelArguments) -> type[Backend]:
    """Import and return the class of the backend called `name` for a model.

    It is built in, or in a file beside the model or in --backend-directory, or of a package. Raises `InvalidArgument`
    with Triton's text for an unknown name; the log of the kernel has a hint beside it.
    """
    target = BUILT_IN.get(name)
    directory = arguments.backend_config.get(DIRECTORY_SETTING, "")
    replaced = name in EXAMPLES and bool(directory) and name in folder_backends(Path(directory))
    if target is not None and not replaced:
        module, _, attribute = target.partition(":")
        return as_backend(getattr(importlib.import_module(module), attribute), f"backend '{name}'")
    file = find_backend_file(name, arguments)
    if file is not None:
        if file.name == PYTHON_BASED_FILE:
            module, _, attribute = PYTHON_BASED.partition(":")
            made: type[Backend] = getattr(importlib.import_module(module), attribute)(file)
            return made
        return as_backend(import_backend_file(file), f"the class of '{file}'")
    for entry_point in entry_points_of(ENTRY_POINT_GROUP):
        if entry_point.name == name:
            make_importable()
            return as_backend(entry_point.load(), f"'{entry_point.value}'")
    if directory and (Path(directory) / name / f"libtriton_{name}.so").is_file():
        logger.error(
            "'%s' has a shared library for the backend '%s': this server runs backends that are written in Python, see "
            "docs/backends.md",
            directory, name,
        )  # fmt: skip
    raise InvalidArgument(
        f"unable to find backend library for backend '{name}', try specifying runtime on the model configuration."
    )
