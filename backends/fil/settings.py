"""Converts parameters of a configuration to settings of the backend. Pure.

Names, defaults and texts are those of Triton's FIL backend (shared_state.h) of 25.09 and later. Where Triton takes a
default for a number that it cannot read, this is an error here. `is_classifier` and `threshold`, which Triton requires,
have defaults here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import InternalError, InvalidArgument, Unsupported
from kernel.tree_files import TREE_FILE_NAMES

if TYPE_CHECKING:
    from backends.base import ModelArguments

#: How a model can be computed; "" chooses by measurement.
ENGINES = ("treelite", "xgboost", "lightgbm")

#: Triton's default of a classifier's threshold, according to its documentation.
_THRESHOLD = 0.5

#: Parameters that Triton has removed, and what replaces each; "" for nothing.
_REMOVED = {
    "algo": "layout",
    "threads_per_tree": "chunk_size",
    "output_class": "is_classifier",
    "storage_type": "",
    "blocks_per_sm": "",
}

#: Parameters for GPUs alone.
_FOR_GPUS = ("layout", "chunk_size", "transfer_threshold")


class FilSettings(msgspec.Struct, frozen=True):
    """How a model is loaded and computed."""

    #: A key of `TREE_FILE_NAMES`; "" if the file says it.
    model_type: str
    #: None if the file says it.
    is_classifier: bool | None
    predict_proba: bool
    threshold: float
    allows_unknown_fields: bool
    #: The most threads of a computation; 0 for all processors of the worker.
    thread_limit: int
    #: One of `ENGINES`, or "".
    engine: str


def fil_settings(arguments: ModelArguments) -> FilSettings:
    """Return the settings of a model. Raises `ServingError` for a wrong value."""
    model_type = arguments.parameter("model_type") or ""
    if model_type and model_type not in TREE_FILE_NAMES:
        raise Unsupported(
            f"model_type '{model_type}' of model '{arguments.model_name}' is unknown; it is one of "
            f"{', '.join(TREE_FILE_NAMES)}"
        )
    engine = arguments.parameter("engine") or ""
    if engine and engine not in ENGINES:
        raise InvalidArgument(
            f"engine '{engine}' of model '{arguments.model_name}' is unknown; it is one of {', '.join(ENGINES)}"
        )
    thread_count = _number(arguments, "cpu_nthread", -1)
    if thread_count != int(thread_count):
        raise InvalidArgument(f"failed to convert '{arguments.parameter('cpu_nthread')}' to integral number")
    return FilSettings(
        model_type=model_type,
        is_classifier=_classifies(arguments),
        predict_proba=_flag(arguments, "predict_proba") or False,
        threshold=_number(arguments, "threshold", _THRESHOLD),
        allows_unknown_fields=_flag(arguments, "xgboost_allow_unknown_field") or False,
        thread_limit=max(0, int(thread_count)),
        engine=engine,
    )


def _classifies(arguments: ModelArguments) -> bool | None:
    """Return `is_classifier`, or what it was called before 25.09."""
    older = arguments.parameter("output_class")
    if older in ("true", "false"):
        return older == "true"
    return _flag(arguments, "is_classifier")


def _flag(arguments: ModelArguments, key: str) -> bool | None:
    value = arguments.parameter(key)
    if not value:
        return None
    if value not in ("true", "false"):
        raise InternalError(f"parameter '{key}' of model '{arguments.model_name}' is '{value}'; expected true or false")
    return value == "true"


def _number(arguments: ModelArguments, key: str, default: float) -> float:
    value = arguments.parameter(key)
    if not value:
        return default
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgument(
            f"parameter '{key}' of model '{arguments.model_name}' is '{value}'; expected a finite number"
        )
    return number


def ignored_parameters(arguments: ModelArguments) -> list[str]:
    """Return a log line for each parameter that has no effect; those of Triton's removed parameters are Triton's."""
    lines = []
    for key, instead in _REMOVED.items():
        if arguments.parameter(key):
            use = f" Use `{instead}` instead." if instead else ""
            lines.append(f"The `{key}` parameter has been removed in 25.09 release.{use}")
    if arguments.parameter("use_experimental_optimizations"):
        lines.append("The `use_experimental_optimizations` parameter is deprecated, and has no effect.")
    lines += [
        f"parameter '{key}' of model '{arguments.model_name}' has no effect: it is for GPUs, and the model runs on the "
        "CPU"
        for key in _FOR_GPUS
        if arguments.parameter(key)
    ]
    return lines
