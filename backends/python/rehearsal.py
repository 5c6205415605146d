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

#: A request changes nothing that the forks must not have.
COMPUTES = True

_SOURCE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "A").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("predict", array + array)]))
        return responses
"""

#: The package of the model's module, which is called like its version, and the modules that models import.
_OF_MODEL = ("1", "triton_python_backend_utils", "c_python_backend_utils")


@contextmanager
def rehearsed_model() -> Iterator[str]:
    """The folder of a model whose version 1 has an output `predict`, twice the input A.

    What workers change in the process is undone.
    """
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
                if name.partition(".")[0] in _OF_MODEL:  # others that were imported are what all workers need
                    del sys.modules[name]
            for place in set(sys.path_importer_cache) - finders:
                del sys.path_importer_cache[place]
