"""What computes a model: Treelite, or the library that has made the file, which may be much faster for batches.

The choice is made once, when an instance is loaded, for all of its requests: so a row has the same result alone and in
a batch. Another library is chosen only if it agrees with Treelite on sample rows and is faster.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from backends.fil.library import error_text, optional_library
from kernel.errors import InternalError, InvalidArgument, Unavailable
from kernel.machine import processor_count

if TYPE_CHECKING:
    from backends.fil.forest import Forest
    from backends.fil.settings import FilSettings
    from shm.arrays import Array

#: The largest difference from Treelite's scores, relative and absolute.
TOLERANCE = 1e-5

#: The sizes of batches that are measured, and how often.
_MEASURED_ROWS = (1, 32)
_REPEATS = 5

#: How much faster than Treelite another library must be, as the product over the measured sizes: so that instances of
#: a model choose the same, though measurements vary.
_MARGIN = 1.5

#: How many rows a thread must have. A team of threads costs more than it saves for fewer.
_ROWS_PER_THREAD = 64


class Engine(Protocol):
    """Computes scores. Not thread-safe."""

    #: One of `backends.fil.settings.ENGINES`.
    name: str

    def scores(self, rows: Array) -> Array:
        """Return the scores of `rows` [rows, features], FP32 or FP64 in C order: [rows, classes]."""


class Threads:
    """How many threads a batch is computed with."""

    def __init__(self, settings: FilSettings) -> None:
        self._limit = settings.thread_limit or processor_count()

    def of(self, row_count: int) -> int:
        return max(1, min(self._limit, row_count // _ROWS_PER_THREAD))


class TreeliteEngine:
    """Treelite's reference predictor."""

    name = "treelite"

    def __init__(self, forest: Forest, threads: Threads) -> None:
        self._forest = forest
        self._threads = threads

    def scores(self, rows: Array) -> Array:
        return self._forest.scores(rows, self._threads.of(len(rows)))


class XgboostEngine:
    """XGBoost, for its own files."""

    name = "xgboost"

    def __init__(self, forest: Forest, threads: Threads) -> None:
        """Raises what XGBoost raises."""
        self._library = optional_library("xgboost")
        self._booster = self._library.Booster(model_file=str(forest.path))
        self._threads = threads
        self._thread_count = 0
        self._set_threads(1)

    def _set_threads(self, count: int) -> None:
        if count != self._thread_count:
            self._booster.set_param({"nthread": count})
            self._thread_count = count

    def scores(self, rows: Array) -> Array:
        self._set_threads(self._threads.of(len(rows)))
        found: Array = self._booster.inplace_predict(rows, missing=np.nan)
        return found.reshape(len(rows), -1)

    def contributions(self, rows: Array) -> Array:
        """Return the SHAP values of the margins: [rows, classes * (features + 1)], the bias last."""
        data = self._library.DMatrix(rows, missing=np.nan, nthread=self._thread_count)
        return np.asarray(self._booster.predict(data, pred_contribs=True, validate_features=False)).reshape(
            len(rows), -1
        )


class LightgbmEngine:
    """LightGBM, for its own files."""

    name = "lightgbm"

    def __init__(self, forest: Forest, threads: Threads) -> None:
        """Raises what LightGBM raises."""
        self._library = optional_library("lightgbm")
        self._library.register_logger(_Silent())
        self._booster = self._library.Booster(model_file=str(forest.path))
        self._threads = threads

    def scores(self, rows: Array) -> Array:
        found = self._booster.predict(rows, num_iteration=-1, num_threads=self._threads.of(len(rows)))
        return np.asarray(found).reshape(len(rows), -1)

    def contributions(self, rows: Array) -> Array:
        threads = self._threads.of(len(rows))
        found = self._booster.predict(rows, pred_contrib=True, num_iteration=-1, num_threads=threads)
        return np.asarray(found).reshape(len(rows), -1)


class _Silent:
    """Drops what LightGBM writes to standard output beside the exception that it raises."""

    def info(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        pass


_OF_TYPE: dict[str, type[XgboostEngine | LightgbmEngine]] = {
    "xgboost": XgboostEngine,
    "xgboost_json": XgboostEngine,
    "xgboost_ubj": XgboostEngine,
    "lightgbm": LightgbmEngine,
}

#: Module → the package that is installed for it, on a machine without a GPU.
_PACKAGES = {"xgboost": "xgboost-cpu", "lightgbm": "lightgbm"}


def explainer_of(model: str, forest: Forest, settings: FilSettings) -> XgboostEngine | LightgbmEngine:
    """Return what computes SHAP values. Raises `ServingError` if nothing can."""
    kind = _OF_TYPE.get(forest.model_type)
    if kind is None:
        raise InvalidArgument(
            f"model '{model}' cannot have the output 'treeshap_output': SHAP values are computed by XGBoost and "
            "LightGBM from their own files, and a Treelite checkpoint is neither"
        )
    if optional_library(kind.name) is None:
        raise Unavailable(
            f"the output 'treeshap_output' of model '{model}' needs {kind.name}, which is not installed. It is "
            f"installed with: pip install {_PACKAGES[kind.name]}"
        )
    return _opened(model, kind, forest, settings)


def _opened(
    model: str, kind: type[XgboostEngine | LightgbmEngine], forest: Forest, settings: FilSettings
) -> XgboostEngine | LightgbmEngine:
    errors = _errors_of(optional_library(kind.name))
    try:
        return kind(forest, Threads(settings))
    except errors as error:
        raise InternalError(f"failed to load model '{model}' with {kind.name}: {error_text(error)}") from error


def _errors_of(library: Any) -> tuple[type[Exception], ...]:
    """Return the errors that a library raises for a model or rows that it cannot use."""
    basic = [getattr(library.core, "XGBoostError", None)] if hasattr(library, "core") else []
    basic += [getattr(library.basic, "LightGBMError", None)] if hasattr(library, "basic") else []
    return (*(each for each in basic if each is not None), TypeError, ValueError)


def chosen_engine(model: str, forest: Forest, settings: FilSettings) -> tuple[Engine, str]:
    """Return what computes a model, and why, for the log. Raises `ServingError` if the wanted engine cannot."""
    reference = TreeliteEngine(forest, Threads(settings))
    kind = _OF_TYPE.get(forest.model_type)
    if settings.engine == "treelite":
        return reference, "as configured"
    if settings.engine:
        if kind is None or kind.name != settings.engine:
            raise InvalidArgument(
                f"engine '{settings.engine}' of model '{model}' cannot compute a file of type '{forest.model_type}'"
            )
        if optional_library(kind.name) is None:
            raise Unavailable(
                f"engine '{settings.engine}' of model '{model}' is not installed. It is installed with: pip install "
                f"{_PACKAGES[kind.name]}"
            )
        return _opened(model, kind, forest, settings), "as configured"
    if kind is None:
        return reference, f"nothing else computes files of type '{forest.model_type}'"
    if optional_library(kind.name) is None:
        return reference, f"{kind.name} is not installed"
    return _measured(kind, forest, reference, settings)


def _measured(
    kind: type[XgboostEngine | LightgbmEngine], forest: Forest, reference: TreeliteEngine, settings: FilSettings
) -> tuple[Engine, str]:
    """Return the faster of Treelite and the library `kind`, if they agree."""
    rows = forest.sample_rows(max(_MEASURED_ROWS))
    try:
        other = kind(forest, Threads(settings))
        expected, found = reference.scores(rows), other.scores(rows)
    except _errors_of(optional_library(kind.name)) as error:
        return reference, f"{kind.name} cannot compute it: {error_text(error)}"
    if expected.shape != found.shape or not np.allclose(expected, found, rtol=TOLERANCE, atol=TOLERANCE):
        return reference, f"the scores of {kind.name} differ by more than {TOLERANCE:g}"
    times = [(_time_s(reference, rows[:count]), _time_s(other, rows[:count])) for count in _MEASURED_ROWS]
    shown = ", ".join(
        f"{count} row{'s' if count > 1 else ''}: {ours * 1e6:.0f} µs with treelite, {theirs * 1e6:.0f} µs with "
        f"{kind.name}"
        for count, (ours, theirs) in zip(_MEASURED_ROWS, times, strict=True)
    )
    ratio = np.prod([ours / theirs for ours, theirs in times])
    return (other, shown) if ratio > _MARGIN else (reference, shown)


def _time_s(engine: Engine, rows: Array) -> float:
    """Return the shortest time of some calls."""
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        engine.scores(rows)
        best = min(best, time.perf_counter() - start)
    return best
