"""A model for the rehearsal of a worker before the forks: see `backends/zygote/rehearsal.py`."""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from backends.python.instance import set_current_instance
from backends.python.model_file import DEFAULT_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOURCE = """
class TritonPythonModel:
    def execute(self, requests):
        return []
"""


@contextmanager
def rehearsed_model() -> Iterator[str]:
    """The folder of a model with version 1, which does nothing. What workers change in the process is undone."""
    modules, finders = set(sys.modules), set(sys.path_importer_cache)
    path, arguments, writes_no_code = list(sys.path), sys.argv, sys.dont_write_bytecode
    with tempfile.TemporaryDirectory(prefix="naiad-rehearsal-") as folder:
        version = Path(folder, "1")
        version.mkdir()
        (version / DEFAULT_NAME).write_text(_SOURCE)
        sys.dont_write_bytecode = True  # each worker is to compile it, as the first one of a model does
        try:
            yield folder
        finally:
            set_current_instance(None)
            sys.path[:], sys.argv, sys.dont_write_bytecode = path, arguments, writes_no_code
            for name in set(sys.modules) - modules:
                del sys.modules[name]
            for place in set(sys.path_importer_cache) - finders:
                del sys.path_importer_cache[place]
