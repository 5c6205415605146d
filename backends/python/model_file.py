"""Imports a model's Python file, as Triton does.

The name of the module is `<version>.<file>`. The file can import modules from the folders of the version and of the
model, also with `from .helper import x`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from typing import TYPE_CHECKING, Any

from backends.python.failures import model_code
from backends.python.plain_function import find_function, model_class_of
from kernel.errors import InternalError

if TYPE_CHECKING:
    from backends.base import ModelArguments

DEFAULT_NAME = "model.py"


def import_model_class(arguments: ModelArguments) -> type[Any]:
    """Import the model's file and return its class `TritonPythonModel`, or one that stands for its one function.

    Raises `InternalError` if the file or the class does not exist, or the file cannot be imported.
    """
    path = arguments.model_file(DEFAULT_NAME)
    if path.suffix != ".py":
        raise InternalError(f"Model name must end with '.py'. Model name is \"{path.name}\".")
    if not path.is_file():
        raise InternalError(f"Python model file not found in '{path}'")
    # At the end of the path, as in Triton: a file of the model must not hide a module of the standard library.
    for folder in (str(arguments.version_dir), str(arguments.model_dir)):
        if folder not in sys.path:
            sys.path.append(folder)
    # Models may import from the current folder, as in Triton, but it hides neither their own modules nor others.
    with contextlib.suppress(FileNotFoundError):  # it was removed
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
    package = types.ModuleType(str(arguments.version))
    package.__path__ = [str(arguments.version_dir)]
    sys.modules[package.__name__] = package
    name = f"{package.__name__}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with model_code():
        spec.loader.exec_module(module)
        if not hasattr(module, "TritonPythonModel"):
            function = find_function(module)
            if function is not None:
                return model_class_of(function)
        model_class: type[Any] = module.TritonPythonModel
    return model_class
