"""Finds the class of a backend by its name in model configurations.

A file beside the model or in --backend-directory is a backend (`backends/registry.py`). An installed package adds
one with an entry point of the group `naiad.backends`; the entry point has the name of the backend. A worker imports
only the class of its own model's backend.

Finds and imports backends that are files: `backend.py` beside a model or in --backend-directory.

A `backend.py` has one backend class. In the backend directory, a folder with a `model.py` is a Python-based backend:
its `TritonPythonModel` runs models that have no `model.py` themselves (Triton). Only workers import these files.

Which installed packages add backends, read without `importlib.metadata` where none does.

That module takes 0.75 MiB of a server's memory, and most servers have the built-in backends only.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import Backend, CustomBackend
from backends.custom_backend import as_backend
from kernel.errors import InternalError, InvalidArgument, failing_as
from kernel.naiad_module import make_importable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from importlib.metadata import EntryPoint
    from types import ModuleType

    from backends.base import ModelArguments

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "naiad.backends"

BUILT_IN = {
    "add_sub": "backends.builtin.add_sub:AddSubBackend",
    "fil": "backends.fil.backend:FilBackend",
    "identity": "backends.builtin.identity:IdentityBackend",
    "mlflow": "backends.mlflow.backend:MlflowBackend",
    "onnxruntime": "backends.onnxruntime.backend:OnnxRuntimeBackend",
    "python": "backends.python.backend:PythonBackend",
    "pytorch": "backends.pytorch.backend:PyTorchBackend",
    "repeat": "backends.builtin.decoupled:RepeatBackend",
    "sklearn": "backends.sklearn.backend:SklearnBackend",
    "square": "backends.builtin.decoupled:SquareBackend",
    "tensorrt": "backends.tensorrt.backend:TensorRtBackend",
}

#: Those of them that are there to be copied. A shop may have a backend of its own with such a name in
#: --backend-directory, which then is the one that is meant.
EXAMPLES = frozenset({"add_sub", "identity", "repeat", "square"})

#: What makes the class of a Python-based backend from its file.
PYTHON_BASED = "backends.python.backend:python_based"


def known_backends(directory: Path | None = None) -> dict[str, str]:
    """Return name → `module:Class`, or file, of all backends, without importing them.

    `directory` is the value of --backend-directory. Files beside models are not among them.
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


BACKEND_FILE = "backend.py"

PYTHON_BASED_FILE = "model.py"

#: The setting of all backends that names the folder (--backend-directory); tritonserver calls it so, too.
DIRECTORY_SETTING = "backend-directory"

#: Path → class, of the files that this process has imported: a process may have several models.
_imported: dict[str, type[Backend] | type[CustomBackend]] = {}


def find_backend_file(name: str, arguments: ModelArguments) -> Path | None:
    """Return the file of the backend called `name`, or None. As in Triton, a file beside the model comes first.

    Raises `InvalidArgument` if the model names a file (`runtime`) that does not exist.
    """
    given = arguments.backend_config.get(DIRECTORY_SETTING, "")
    shared = Path(given, name).absolute() if given and _is_plain(name) else None
    beside = [arguments.version_dir, arguments.model_dir]
    wanted = str(arguments.config.get("runtime", ""))
    places = [folder / BACKEND_FILE for folder in beside]
    if shared is not None:
        places += [shared / BACKEND_FILE, shared / PYTHON_BASED_FILE]
    if wanted:
        places = [place for place in places if place.name == wanted]
    found = next((place for place in places if place.is_file()), None)
    if found is None and wanted:
        searched = ":".join(str(folder) for folder in [*beside, *([shared] if shared is not None else [])])
        raise InvalidArgument(
            f"unable to find backend library '{wanted}' for model '{arguments.model_name}', searched: {searched}"
        )
    return found


def folder_backends(directory: Path | None) -> dict[str, str]:
    """Return name → file of the backends in --backend-directory. Blocks; a folder that cannot be read has none."""
    found = {}
    try:
        folders = [] if directory is None else sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError:
        return {}
    for folder in folders:
        for name in (BACKEND_FILE, PYTHON_BASED_FILE):
            if (folder / name).is_file():
                found[folder.name] = str(folder / name)
                break
    return found


def import_backend_file(path: Path) -> type[Backend] | type[CustomBackend]:
    """Import a `backend.py` and return its class. Its folder is searched for modules after all others.

    Raises `InternalError` if it cannot be imported, `InvalidArgument` if it has not exactly one backend class.
    """
    key = str(path.resolve())
    if key not in _imported:
        make_importable()
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        _imported[key] = _only_backend(_import(path, key), path)
    return _imported[key]


def _import(path: Path, key: str) -> ModuleType:
    name = f"naiad_backend_{hashlib.sha256(key.encode(errors='surrogateescape')).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # for pickle and dataclasses
    try:
        with failing_as(lambda error: InternalError(f"'{path}' cannot be imported: {type(error).__name__}: {error}")):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _only_backend(module: ModuleType, path: Path) -> type[Backend] | type[CustomBackend]:
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    own = [
        each for each in classes if issubclass(each, (Backend, CustomBackend)) and each.__module__ == module.__name__
    ]
    found = [each for each in own if not any(other is not each and issubclass(other, each) for other in own)]
    if len(found) != 1:
        names = ", ".join(sorted(each.__name__ for each in found)) or "none"
        raise InvalidArgument(
            f"'{path}' must have one class that is a backends.base.Backend or backends.base.CustomBackend, "
            f"it has {names}"
        )
    return found[0]


def _is_plain(name: str) -> bool:
    """Whether a backend's name can be the name of a folder in the backend directory, and leads nowhere else."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


#: Folders with the metadata of an installed package.
_METADATA = (".dist-info", ".egg-info")


def entry_points_of(group: str, path: Iterable[str] | None = None) -> list[EntryPoint]:
    """Return the entry points of a group. `path` is where packages are looked for, `sys.path` by default."""
    searched = sys.path if path is None else list(path)
    if not any(_names_group(Path(entry), f"[{group}]".encode()) for entry in searched):
        return []
    from importlib.metadata import distributions

    return [point for found in distributions(path=searched) for point in found.entry_points if point.group == group]


def _names_group(entry: Path, header: bytes) -> bool:
    """Tell whether the metadata of a package in this folder has the group; for an archive, whether it may have it."""
    try:
        folders = [each for each in entry.iterdir() if each.name.endswith(_METADATA)]
    except NotADirectoryError:
        return True
    except OSError:
        return False
    return any(_has(folder / "entry_points.txt", header) for folder in folders)


def _has(file: Path, header: bytes) -> bool:
    try:
        return header in file.read_bytes()
    except OSError:
        return False
