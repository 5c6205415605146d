"""Functions of `pb_utils` that call the server: model control, and calls of other models.

This version of the server does not support them. The functions exist so that models can import them; a call raises
`TritonModelException`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from backends.python.failures import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Mapping


def not_supported(what: str) -> TritonModelException:
    """Return the exception for a feature that the server does not have; `what` names the feature."""
    return TritonModelException(f"{what} is not supported by this version of the server yet")


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> NoReturn:
    raise not_supported(f"loading model '{model_name}' from a model (load_model)")


def unload_model(model_name: str, unload_dependents: bool = False) -> NoReturn:
    raise not_supported(f"unloading model '{model_name}' from a model (unload_model)")


def is_model_ready(model_name: str, model_version: str = "") -> NoReturn:
    raise not_supported(f"asking from a model whether model '{model_name}' is ready (is_model_ready)")
