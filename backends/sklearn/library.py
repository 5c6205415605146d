"""scikit-learn and what reads its files.

A zygote imports this module before it forks workers, so the modules of usual estimators are imported here, once for all
workers, and nothing is computed: in a fork of a process in which scikit-learn has computed with OpenMP, the next
computation waits for threads that do not exist, without an end.
"""

from __future__ import annotations

import importlib
from typing import Any

from kernel.errors import Unavailable
from kernel.machine import processor_count
from kernel.texts import install_command

#: Modules of estimators that most models have.
_USUAL = ("sklearn.compose", "sklearn.ensemble", "sklearn.feature_extraction.text", "sklearn.impute",
          "sklearn.linear_model", "sklearn.neighbors", "sklearn.pipeline", "sklearn.preprocessing", "sklearn.svm",
          "sklearn.tree")  # fmt: skip

#: Module → what was imported, or the error.
_found: dict[str, Any] = {}


def _import_all() -> None:
    for name in (*_USUAL, "joblib", "threadpoolctl", "pandas", "skops.io"):
        try:
            _found[name] = importlib.import_module(name)
        except (ImportError, OSError) as error:
            _found[name] = error


def required(name: str) -> Any:
    """Return a module that a model needs: of scikit-learn, `joblib` or `skops.io`. Raises `Unavailable`."""
    found = _found[name]
    if isinstance(found, Exception):
        raise Unavailable(
            f"the backend 'sklearn' needs '{name.partition('.')[0]}', which cannot be imported: {found}. It is "
            f"installed with: {install_command('sklearn')}"
        )
    return found


def optional(name: str) -> Any:
    """Return a module; None if it cannot be imported."""
    found = _found[name]
    return None if isinstance(found, Exception) else found


#: The number of threads that the libraries of this process compute with; 0 if they choose it themselves.
_thread_limit = 0


def limit_threads(count: int) -> None:
    """Let the libraries of this process compute with at most `count` threads. Call it before the first computation.

    Does nothing if that is the limit already: to look for the libraries, threadpoolctl takes 1.7 MiB in each fork.
    """
    global _thread_limit
    limits = optional("threadpoolctl")
    if limits is not None and count != _thread_limit:
        limits.threadpool_limits(limits=count)
        _thread_limit = count


_import_all()
limit_threads(processor_count())  # before the fork; a worker of fewer processors does it again
