"""The packages that read MLflow's folders: PyYAML, and pandas for models of columns.

A zygote imports this module before it forks workers, so all is imported here once, with the libraries of the usual
flavours, and nothing is computed: see `backends/sklearn/library.py`.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import backends.fil.library
import backends.sklearn.library  # noqa: F401 - for the forks, as above
from backends.fil.library import optional_library
from kernel.errors import Unavailable
from kernel.texts import install_command

#: Module → what was imported, or the error.
imported: dict[str, Any] = {}


def _import_all() -> None:
    for name in ("yaml", "pandas"):
        try:
            imported[name] = importlib.import_module(name)
        except (ImportError, OSError) as error:
            imported[name] = error


_import_all()


def _required(name: str, package: str) -> Any:
    found = imported[name]
    if isinstance(found, Exception):
        raise Unavailable(
            f"the backend 'mlflow' needs {package}, which cannot be imported: {found}. It is installed with: "
            f"{install_command('mlflow')}"
        )
    return found


def yaml_library() -> Any:
    """Return the module `yaml`. Raises `Unavailable` if it cannot be imported."""
    return _required("yaml", "PyYAML")


def pandas_library() -> Any:
    """Return the module `pandas`. Raises `Unavailable` if it cannot be imported."""
    return _required("pandas", "pandas")


def tree_library(name: str, package: str) -> Any:
    """Return the module `xgboost` or `lightgbm`. Raises `Unavailable` if it cannot be imported."""
    found = optional_library(name)
    if found is None:
        raise Unavailable(
            f"an MLflow folder of the flavour '{name}' needs {name}, which cannot be imported. It is installed with: "
            f"pip install {package}"
        )
    return found


#: What is set before mlflow is imported. Its telemetry is switched off as that of other libraries. The other one makes
#: it load pickles, which the operator of the server has allowed with --allow-pickle.
_MLFLOW_SETTINGS = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "true",
}


def pyfunc_library(loader: str) -> Any:
    """Import and return the module `mlflow.pyfunc`, for a model that is loaded by the module `loader`.

    No zygote imports it: few models need it, and it takes seconds. Raises `Unavailable` if it cannot be imported.
    """
    os.environ.update(_MLFLOW_SETTINGS)
    try:
        return importlib.import_module("mlflow.pyfunc")
    except (ImportError, OSError) as error:
        raise Unavailable(
            f"an MLflow folder that is loaded by '{loader}' needs the package mlflow, which cannot be imported: "
            f"{error}. It is installed with: pip install mlflow-skinny (and what the model's requirements.txt has)"
        ) from error
