"""Finds our packages also where a program has packages of its own with the same names.

The server's packages are called `kernel`, `protocols`, `schedulers`, `backends` and `shm`, and Python has one package
for a name. If a program has one too, that package gets our folder as another place for modules, so that each finds its
own: `backends.base` is ours, and any other name the program's. That works unless both have a module of the same name;
then importing `naiad` raises `ImportError`, which names both folders.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # as type checkers know it: the module `typing` is not needed here
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: Our packages.
NAMES = ("kernel", "protocols", "schedulers", "backends", "shm")

#: What a folder has besides modules of its package.
_NO_MODULES = ("__init__", "__main__", "__pycache__")


def _our_folder() -> str:
    """Return the folder with our packages: beside this one if it is installed, else two above it in a checkout."""
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.isfile(os.path.join(beside, "kernel", "embedding", "__init__.py")):
        return beside
    return os.path.dirname(os.path.dirname(beside))


OUR_FOLDER = _our_folder()


class SharedNames:
    """A finder of modules (`sys.meta_path`) for our packages, before all others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the package of the program with our folder added, or ours; None for names that are not ours."""
        if name not in NAMES:
            return None
        ours = os.path.join(OUR_FOLDER, name)
        found = self._others(name, path, target)
        if found is None or found.origin is None or found.origin == os.path.join(ours, "__init__.py"):
            folders = _plain_folders(name, ours)
            check_modules(name, folders)
            return _our_spec(name, [ours, *folders])
        folders = list(found.submodule_search_locations or ())
        check_modules(name, folders or [found.origin])
        found.submodule_search_locations = [ours, *folders]
        return found

    def _others(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and (found := finder.find_spec(name, path, target)) is not None:
                return found
        return None


def _plain_folders(name: str, ours: str) -> list[str]:
    """Return the folders of a package without `__init__.py`, which Python does not search if it finds ours as well."""
    found = (os.path.join(entry, name) for entry in sys.path)
    folders = dict.fromkeys(os.path.abspath(folder) for folder in found if os.path.isdir(folder))
    return [each for each in folders if each != ours and not os.path.exists(os.path.join(each, "__init__.py"))]


def _our_spec(name: str, folders: list[str]) -> ModuleSpec:
    spec = PathFinder.find_spec(name, [OUR_FOLDER])
    assert spec is not None, f"'{OUR_FOLDER}' has no package '{name}'"
    spec.submodule_search_locations = folders
    return spec


def share_names() -> None:
    """Let our packages be found, beside the program's own. Raises `ImportError` if a module has the name of one."""
    if any(isinstance(each, SharedNames) for each in sys.meta_path):
        return
    finder = SharedNames()
    for name in NAMES:
        module = sys.modules.get(name)
        if module is None:
            finder.find_spec(name)  # raises the error now, and not with the first use of a name
        else:
            _add_our_folder(name, module)
    sys.meta_path.insert(0, finder)


def _add_our_folder(name: str, module: ModuleType) -> None:
    """Do the same for a package or module that the program has imported already."""
    ours = os.path.join(OUR_FOLDER, name)
    folders = list(getattr(module, "__path__", ()))
    if ours in folders:
        return
    check_modules(name, folders or [str(getattr(module, "__file__", ""))])
    module.__path__ = [ours, *folders]
    if module.__spec__ is not None:
        module.__spec__.submodule_search_locations = [ours, *folders]


def check_modules(name: str, theirs: Iterable[str]) -> None:
    """Raise `ImportError` if a package of the program, in the folders `theirs`, has a module that ours has, too."""
    ours = os.path.join(OUR_FOLDER, name)
    for folder in theirs:
        if os.path.realpath(folder) == os.path.realpath(ours):
            continue
        if both := sorted(_modules(ours) & _modules(folder)):
            raise ImportError(
                f"your package '{name}' ({folder}) and Naiad's package '{name}' ({ours}) both have "
                f"{'a module' if len(both) == 1 else 'modules'} called {', '.join(repr(each) for each in both)}, and "
                f"Python can import only one of them: rename yours, or run the server as a process of its own "
                "('naiad run', without that folder in PYTHONPATH) and send requests to it"
            )


def _modules(folder: str) -> set[str]:
    """Return the names of the modules and packages in `folder`; none if it is a file, or cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return {
                each.name.partition(".")[0]
                for each in entries
                if not each.name.startswith(_NO_MODULES) and (each.name.endswith((".py", ".so")) or _is_package(each))
            }
    except OSError:
        return set()


def _is_package(entry: os.DirEntry[str]) -> bool:
    """Whether a folder has a module: folders of other files are no package, though Python would import them."""
    if "." in entry.name or not entry.is_dir():
        return False
    with os.scandir(entry.path) as files:
        return any(file.name.endswith((".py", ".so")) for file in files)
