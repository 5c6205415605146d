"""The import of a model's file, rehearsed before workers are forked: see `backends/zygote/rehearsal.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from backends.base import ModelArguments
from backends.python.model_file import DEFAULT_NAME, import_model_class
from backends.python.model_modules import ModelModules

_SOURCE = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


def rehearse() -> None:
    """Import the file of a model that does nothing, and forget it."""
    with tempfile.TemporaryDirectory(prefix="naiad-rehearsal-") as folder:
        version = Path(folder, "1")
        version.mkdir()
        (version / DEFAULT_NAME).write_text(_SOURCE)
        arguments = ModelArguments({"name": "m"}, Path(folder), 1)
        modules, path, finders = set(sys.modules), list(sys.path), set(sys.path_importer_cache)
        ModelModules(arguments.model_dir, arguments.version_dir).claim_names()
        import_model_class(arguments)
        for name in set(sys.modules) - modules:
            del sys.modules[name]
        sys.path[:] = path
        for place in set(sys.path_importer_cache) - finders:
            del sys.path_importer_cache[place]
