"""What computes the models of MLflow's flavours: each calls what `mlflow.pyfunc` would call for `predict`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from backends.fil.library import error_text, load_failure
from backends.mlflow.library import tree_library
from backends.mlflow.model_folder import PYFUNC
from backends.mlflow.pyfunc import PyfuncPredictor
from backends.mlflow.pytorch import PytorchPredictor
from backends.sklearn.estimator import METHODS, call, signature_of, use_one_thread
from backends.sklearn.library import limit_threads
from backends.sklearn.model_file import load_estimator
from kernel.errors import InternalError, InvalidArgument, Unavailable, Unsupported
from kernel.machine import processor_count

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from backends.base import ModelArguments
    from backends.mlflow.model_folder import MlflowModel
    from shm.arrays import Array

#: The classes of XGBoost that read files of their own, by the names that MLflow writes.
_XGBOOST_CLASSES = {
    f"xgboost.sklearn.{name}": name
    for name in ("XGBClassifier", "XGBRFClassifier", "XGBRFRegressor", "XGBRanker", "XGBRegressor")
}
_XGBOOST_BOOSTER = "xgboost.core.Booster"
_LIGHTGBM_BOOSTER = "lightgbm.basic.Booster"

#: How many rows a thread must have. A team of threads costs more than it saves for fewer.
_ROWS_PER_THREAD = 64


class Predictor(Protocol):
    """A model in memory. Not thread-safe."""

    #: How many columns the model was fitted with; 0 if it does not say, as a model of texts.
    feature_count: int
    #: The names of these columns; empty if it was fitted with an array.
    feature_names: tuple[str, ...]
    #: Whether a model of columns is called with a DataFrame, which may have texts. Otherwise with an array of numbers.
    takes_tables: bool
    #: Whether a model that does not say how many columns it has takes texts.
    takes_texts: bool
    #: Whether a model of named tensors is called with a dictionary of arrays.
    takes_dictionaries: bool
    #: Whether the columns must be called as those that the model was fitted with.
    compares_names: bool

    def predict(self, rows: Any) -> Array | dict[str, Array]:
        """Return the result for `rows`, a DataFrame or an array [rows, ...]: an array [rows, ...] of two or more
        dimensions, or one for each name. Raises `ServingError`."""


def open_predictor(arguments: ModelArguments, found: MlflowModel, warn: Callable[[str], None]) -> Predictor:
    """Load the model of a folder. `warn` gets a line for each warning of the library. Raises `ServingError`."""
    model = arguments.model_name
    if found.flavour == PYFUNC:
        return PyfuncPredictor(arguments, found)
    path = arguments.version_dir / found.filename
    if not path.exists():
        raise Unavailable(f"unable to find '{path}' for model '{model}', which its file MLmodel names")
    limit_threads(processor_count())
    if found.flavour == "pytorch":
        return PytorchPredictor(arguments, path)
    kind = str(found.fields.get("model_class") or "")
    if found.flavour == "xgboost":
        return XgboostPredictor(model, path, kind or _XGBOOST_BOOSTER)
    if found.flavour == "lightgbm" and kind in ("", _LIGHTGBM_BOOSTER):
        return LightgbmPredictor(model, path)
    named = {**arguments.config, "default_model_filename": found.filename}
    estimator = load_estimator(msgspec.structs.replace(arguments, config=named), warn)
    return EstimatorPredictor(model, estimator, found.method)


class EstimatorPredictor:
    """An estimator of scikit-learn, or of a library that has its interface."""

    takes_tables = True
    takes_texts = True
    takes_dictionaries = False
    compares_names = False  # scikit-learn does

    def __init__(self, model: str, estimator: Any, method: str) -> None:
        """Raises `ServingError` if the estimator does not have the method."""
        signature = signature_of(estimator, model)
        if method not in signature.methods:
            raise Unsupported(
                f"model '{model}' is called by '{method}' (predict_fn in its file MLmodel); expected one of "
                f"{', '.join(each for each in METHODS if each in signature.methods)}"
            )
        use_one_thread(estimator)
        self._estimator = estimator
        self._method = method
        self.feature_count = signature.feature_count
        self.feature_names = signature.feature_names

    def predict(self, rows: Any) -> Array:
        return call(self._estimator, [self._method], rows)[self._method]


class XgboostPredictor:
    """A booster of XGBoost, or one of its classes with scikit-learn's interface, from a file of XGBoost."""

    takes_tables = False
    takes_texts = False
    takes_dictionaries = False
    compares_names = True

    def __init__(self, model: str, path: Path, kind: str) -> None:
        """Raises `ServingError`."""
        library = self._library = tree_library("xgboost", "xgboost-cpu")
        self._errors = (library.core.XGBoostError, TypeError, ValueError)
        if kind != _XGBOOST_BOOSTER and kind not in _XGBOOST_CLASSES:
            raise Unsupported(
                f"model '{model}' is of the class '{kind}' (model_class in its file MLmodel); supported are "
                f"{', '.join((_XGBOOST_BOOSTER, *_XGBOOST_CLASSES))}"
            )
        self._wrapper: Any = None
        try:
            if kind == _XGBOOST_BOOSTER:
                self._booster = library.Booster(model_file=str(path))
            else:
                self._wrapper = getattr(library, _XGBOOST_CLASSES[kind])()
                self._wrapper.load_model(str(path))
                self._booster = self._wrapper.get_booster()
        except ImportError as error:
            raise Unavailable(f"model '{model}' of the class '{kind}' needs scikit-learn: {error}") from error
        except self._errors as error:
            raise load_failure(model, error) from error
        self._thread_count = 0
        self.feature_count = int(self._booster.num_features())
        self.feature_names = tuple(self._booster.feature_names or ())

    def predict(self, rows: Any) -> Array:
        _check_width(rows, self.feature_count)
        threads = _thread_count(len(rows))
        if threads != self._thread_count:
            self._booster.set_param({"nthread": threads})
            self._thread_count = threads
        try:
            if self._wrapper is not None:
                return _two_dimensions(self._wrapper.predict(rows))
            data = self._library.DMatrix(rows, nthread=threads)
            return _two_dimensions(self._booster.predict(data, validate_features=False))
        except self._errors as error:
            raise InvalidArgument(f"predict: {error_text(error)}") from error


class LightgbmPredictor:
    """A booster of LightGBM, from its text file."""

    takes_tables = False
    takes_texts = False
    takes_dictionaries = False
    compares_names = False

    def __init__(self, model: str, path: Path) -> None:
        """Raises `ServingError`."""
        library = tree_library("lightgbm", "lightgbm")
        library.register_logger(_Silent())
        self._errors = (library.basic.LightGBMError, TypeError, ValueError)
        try:
            self._booster = library.Booster(model_file=str(path))
        except (*self._errors, OSError) as error:
            raise load_failure(model, error) from error
        self.feature_count = int(self._booster.num_feature())
        self.feature_names = tuple(self._booster.feature_name())

    def predict(self, rows: Any) -> Array:
        _check_width(rows, self.feature_count)
        try:
            return _two_dimensions(self._booster.predict(rows, num_threads=_thread_count(len(rows))))
        except self._errors as error:
            raise InvalidArgument(f"predict: {error_text(error)}") from error


class _Silent:
    """Drops what LightGBM writes to standard output beside the exception that it raises."""

    def info(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        pass


def _check_width(rows: Array, feature_count: int) -> None:
    if rows.ndim != 2 or rows.shape[1] != feature_count:
        raise InvalidArgument(
            f"predict: the rows have the shape {list(rows.shape[1:])}; expected {feature_count} columns, with which "
            "the model was fitted"
        )


def _thread_count(row_count: int) -> int:
    return max(1, min(processor_count(), row_count // _ROWS_PER_THREAD))


def _two_dimensions(result: Any) -> Array:
    array = np.asarray(result)
    if not array.ndim:
        raise InternalError("predict has returned a single number for all rows")
    return array.reshape(len(array), 1) if array.ndim == 1 else array
