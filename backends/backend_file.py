"""Finds and imports backends that are files: `backend.py` beside a model or in --backend-directory.

A `backend.py` has one backend class. In the backend directory, a folder with a `model.py` is a Python-based backend:
its `TritonPythonModel` runs models that have no `model.py` themselves (Triton). Only workers import these files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import Backend, CustomBackend
from kernel.errors import InternalError, InvalidArgument
from kernel.naiad_module import make_importable

if TYPE_CHECKING:
    from types import ModuleType

    from backends.base import ModelArguments

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
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InternalError(f"'{path}' cannot be imported: {type(error).__name__}: {error}") from error
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
