"""The modules of one model in a process of several: two models may each have a `utils.py`.

A module is the model's if its file lies in the model's folder. When another model's turn begins, such modules leave
`sys.modules`, and folders of the model leave `sys.path`; they come back with the model's own next turn. So imports find
what they would find in a process of the model's own, also late ones inside of `execute`, and pickled objects find their
classes. Only code that runs while another model has its turn, in a thread of the model, must not import such modules.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING

from backends.model_names import ModelNames

if TYPE_CHECKING:
    from pathlib import Path
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
