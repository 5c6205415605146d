"""Python-based backends: a folder of --backend-directory whose `model.py` runs models that have none themselves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

from backends.python.backend import PythonBackend

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, ClassVar

    from backends.base import ModelArguments


class PythonBasedBackend(PythonBackend):
    """Runs a model with the `TritonPythonModel` of its backend. `python_based` makes a subclass for each file."""

    #: The backend's `model.py`.
    file: ClassVar[Path]
    #: Its modules would be those of each model of a process.
    shares_worker = False

    def _import_model_class(self, arguments: ModelArguments) -> type[Any]:
        folder = str(self.file.parent)
        if folder not in sys.path:  # the backend's own modules
            sys.path.append(folder)
        return super()._import_model_class(msgspec.structs.replace(arguments, code_file=self.file))


def python_based(file: Path) -> type[PythonBasedBackend]:
    """Return the backend class for a `model.py` in the backend directory."""
    return type("PythonBasedBackend", (PythonBasedBackend,), {"file": file, "__module__": __name__})
