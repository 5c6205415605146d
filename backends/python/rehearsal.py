"""The completion of a model, rehearsed before workers are forked: see `backends/zygote/rehearsal.py`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from backends.base import ModelArguments
from backends.python.backend import PythonBackend
from backends.python.instance import set_current_instance
from backends.python.model_file import DEFAULT_NAME

if TYPE_CHECKING:
    from backends.base import Config, Host

_SOURCE = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


def rehearse(host: Host, config: Config) -> None:
    """Import the file of a model that does nothing, complete its configuration, and forget it."""
    modules, finders = set(sys.modules), set(sys.path_importer_cache)
    path, arguments = list(sys.path), sys.argv
    with tempfile.TemporaryDirectory(prefix="naiad-rehearsal-") as folder:
        version = Path(folder, "1")
        version.mkdir()
        (version / DEFAULT_NAME).write_text(_SOURCE)
        try:
            PythonBackend(host).complete(ModelArguments(config, Path(folder), 1))
        finally:
            set_current_instance(None)
            sys.path[:], sys.argv = path, arguments
            for name in set(sys.modules) - modules:
                del sys.modules[name]
            for place in set(sys.path_importer_cache) - finders:
                del sys.path_importer_cache[place]
