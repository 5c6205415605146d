"""The libraries of trees: Treelite, which the backend needs, and XGBoost and LightGBM, which it uses if they are there.

A zygote imports this module before it forks workers, so they are imported here and nothing is computed: in a fork of a
process in which one of them has computed, the next computation waits for threads that do not exist, without an end.
"""

from __future__ import annotations

import re
from typing import Any

from kernel.errors import InternalError, Unavailable
from kernel.texts import install_command

#: The libraries by the name of their module; an error in place of one that cannot be imported.
_libraries: dict[str, Any] = {}

#: In front of each error text of Treelite: the time, and the place in its source.
_POSITION = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+?:\d+: ", re.MULTILINE)


def _import_all() -> None:
    try:
        import treelite

        _libraries["treelite"] = treelite
    except (ImportError, OSError) as error:  # OSError: a shared library that it needs is missing
        _libraries["treelite"] = error
    try:
        import xgboost

        _libraries["xgboost"] = xgboost
    except (ImportError, OSError) as error:
        _libraries["xgboost"] = error
    try:
        import lightgbm

        _libraries["lightgbm"] = lightgbm
    except (ImportError, OSError) as error:
        _libraries["lightgbm"] = error


_import_all()


def treelite_library() -> Any:
    """Return the module `treelite`. Raises `Unavailable` if it cannot be imported."""
    found = _libraries["treelite"]
    if isinstance(found, Exception):
        raise Unavailable(
            f"the backend 'fil' needs Treelite, which cannot be imported: {found}. It is installed with: "
            f"{install_command('fil')}"
        )
    return found


def optional_library(name: str) -> Any:
    """Return the module `xgboost` or `lightgbm`; None if it cannot be imported."""
    found = _libraries[name]
    return None if isinstance(found, Exception) else found


def error_text(error: Exception) -> str:
    """Return the text of an error of these libraries in one line, without places in their sources."""
    text = _POSITION.sub("", str(error)).partition("\nStack trace:")[0]
    return " ".join(text.split())


def load_failure(model: str, error: Exception) -> InternalError:
    """Return the error for a model file that a library cannot read."""
    return InternalError(f"failed to load model '{model}': {error_text(error)}")
