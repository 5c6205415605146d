"""The modules of one model in a process of several: two models may each have a `utils.py`.

A module is the model's if its file lies in the model's folder. When another model's turn begins, such modules leave
`sys.modules`, and folders of the model leave `sys.path`; they come back with the model's own next turn. So imports find
what they would find in a process of the model's own, also late ones inside of `execute`, and pickled objects find their
classes. Only code that runs while another model has its turn, in a thread of the model, must not import such modules.

A model's own modules take precedence over our packages of the same name.

A model may have a module `backends`, or a package `shm`, beside its file, as in Triton. Our modules were imported
before, and refer to one another as objects: they do not need their names in `sys.modules` any more. Code that asks for
one of ours still finds it (`from backends.base import Backend` of a backend beside the model) where the model has no
module of that name: below a module `backends` it has none, and below a package `backends` ours come last.

An environment of a model's own may have installed packages with our names. They take precedence too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType


class ModelModules:
    """What a model has of its own in `sys.modules` and `sys.path`. Belongs to the thread whose turn it is."""

    def __init__(self, model_dir: Path, version_dir: Path | None = None) -> None:
        """`version_dir` is the folder that modules are found in before `model_dir`."""
        self._model_dir = model_dir
        self._modules: dict[str, ModuleType] = {}
        self._paths: list[str] = []
        #: How many modules there were when the turn began. Other modules are looked through when there are more.
        self._count = 0
        self._names = ModelNames([str(version_dir or model_dir), str(model_dir)])

    def claim_names(self) -> None:
        """Let the model have the names of our packages that its own modules have. Call it before the model's file is
        imported, when everything of ours is."""
        self._names.claim()

    def enter(self) -> None:
        """Bring the model's modules and folders back."""
        self._names.claim_again()
        sys.modules.update(self._modules)
        sys.path += [path for path in self._paths if path not in sys.path]
        self._count = len(sys.modules)

    def leave(self) -> None:
        """Take the model's modules and folders away, those included that it has imported since `enter`."""
        if len(sys.modules) != self._count:
            names = [name for name, module in list(sys.modules.items()) if self._is_own(module)]
        else:
            names = [name for name in self._modules if name in sys.modules]
        self._modules = {name: sys.modules.pop(name) for name in names}
        self._names.give_back()
        self._paths = [path for path in sys.path if self._lies_within(path)]
        sys.path[:] = [path for path in sys.path if not self._lies_within(path)]

    def _is_own(self, module: ModuleType | None) -> bool:
        """Whether a module's file, or a folder of a package, is the model's. None stands for a refused import."""
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            return self._lies_within(file)
        try:  # a package without a file: `<version>`, or a folder without `__init__.py`
            return any(self._lies_within(str(path)) for path in getattr(module, "__path__", ()))
        except Exception:  # objects that libraries put into sys.modules may raise anything
            return False

    @cached_property
    def _folders(self) -> tuple[str, ...]:
        """The model's folder as it is written and as it is, each with a slash at its end."""
        return tuple({f"{self._model_dir}/", f"{self._model_dir.resolve()}/"})

    def _lies_within(self, path: str) -> bool:
        return f"{path}/".startswith(self._folders)


#: The names of our packages.
OUR_NAMES = ("backends", "kernel", "protocols", "schedulers", "shm")

#: The folder that they are in.
_OUR_FOLDER = os.path.realpath(Path(__file__).parents[2])


#: Whether this process runs on an interpreter of the model's own, which may have packages with our names. Set by
#: `backends/portable/start.py`.
own_interpreter = False


class ModelNames:
    """Which of our names are a model's. Each of its models has one in a process of several."""

    def __init__(self, folders: Sequence[str]) -> None:
        """`folders` are the model's folders, in the order in which its modules are found in them."""
        self._folders = list(folders)
        #: Our modules that were removed from `sys.modules`, by name.
        self._ours: dict[str, ModuleType] = {}
        #: Those names of the model that are modules and no packages.
        self._plain: set[str] = set()
        self._finder: _NamesFinder | None = None

    @property
    def taken(self) -> tuple[str, ...]:
        """Our names that are the model's."""
        return () if self._finder is None else self._finder.names

    def claim(self) -> None:
        """Find out which of our names the model uses, and free these names. Call it once."""
        assert self._finder is None, "called once"
        specs = {name: found for name in self._candidates() if (found := self._find(name)) is not None}
        if specs:
            self._finder = _NamesFinder(tuple(specs), self._folders, self._ours)
            self._plain = {name for name, found in specs.items() if found.submodule_search_locations is None}
            self.claim_again()

    def claim_again(self) -> None:
        """Free the names again, after `give_back`. The caller then restores the model's modules."""
        if self._finder is None:
            return
        for name, module in list(sys.modules.items()):
            top, _, below = name.partition(".")
            if top in self._finder.names and module is not None and _lies_with_ours(module):
                self._ours[name] = module
                # Below a module that is not a package Python asks no finder: what is ours stays there.
                if not (below and top in self._plain):
                    del sys.modules[name]
        sys.meta_path.insert(0, self._finder)

    def give_back(self) -> None:
        """Restore our modules: another model executes. The caller has removed the model's from `sys.modules`."""
        if self._finder is not None:
            sys.meta_path.remove(self._finder)
            sys.modules.update(self._ours)

    def _candidates(self) -> Sequence[str]:
        """Return which of our names the model may have. Most models have none.

        A search in all folders of `sys.path` would change memory that a forked worker shares with others.
        """
        if own_interpreter:
            return OUR_NAMES
        found: set[str] = set()
        for folder in self._folders:
            with contextlib.suppress(OSError):  # a folder that cannot be read has no modules
                found.update(entry.partition(".")[0] for entry in os.listdir(folder))
        return [name for name in OUR_NAMES if name in found]

    def _find(self, name: str) -> ModuleSpec | None:
        """Return where the module called `name` is that is not ours; None if there is none before ours."""
        found = PathFinder.find_spec(name, self._folders)
        if found is None:
            found = PathFinder.find_spec(name)
            if found is not None and _is_ours(found):
                found = None
        return found


class _NamesFinder:
    """Finds modules with the names that the model uses, before all other finders: the model's first, then ours."""

    def __init__(self, names: tuple[str, ...], folders: list[str], ours: dict[str, ModuleType]) -> None:
        self.names = names
        self._folders = folders
        self._ours = ours

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None:
            return PathFinder.find_spec(name, self._folders, target) if name in self.names else None
        if name.partition(".")[0] not in self.names:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None:
            return found
        if name in self._ours:
            # Not a subclass of `importlib.abc.Loader`: that module imports much.
            return ModuleSpec(name, self, is_package=hasattr(self._ours[name], "__path__"))  # type: ignore[arg-type]  # it has what a loader needs
        parent = self._ours.get(name.rpartition(".")[0])  # this one is ours, too, but not imported yet
        return None if parent is None else PathFinder.find_spec(name, list(parent.__path__), target)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._ours[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """See `importlib.abc.Loader`: it was executed when it was imported for the first time."""


def _is_ours(spec: ModuleSpec) -> bool:
    places = spec.submodule_search_locations or [spec.origin or ""]
    return all(os.path.realpath(place).startswith(_OUR_FOLDER + os.sep) for place in places)


def _lies_with_ours(module: ModuleType) -> bool:
    """Whether a module with one of our names is ours: its file is in our folder, or a package without a file is."""
    file = getattr(module, "__file__", None)
    places = [file] if isinstance(file, str) else [str(place) for place in getattr(module, "__path__", ())]
    return any(os.path.realpath(place).startswith(_OUR_FOLDER + os.sep) for place in places)
