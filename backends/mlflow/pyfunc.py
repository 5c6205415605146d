"""Models that the package mlflow loads and calls: all flavours that have no reader of their own here.

mlflow imports the module that the file `MLmodel` names, and opens pickles: this is code of the model's author, so a
model is loaded only if the operator has allowed pickles for it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from backends.mlflow.library import pyfunc_library
from backends.mlflow.model_folder import MLMODEL
from backends.sklearn.model_file import check_pickles_allowed
from kernel.errors import InternalError, InvalidArgument, ServingError, Unavailable, failing_as

if TYPE_CHECKING:
    from backends.base import ModelArguments
    from backends.mlflow.model_folder import MlflowModel
    from shm.arrays import Array

#: The codes of mlflow's errors that mean wrong inputs.
_WRONG_INPUTS = ("BAD_REQUEST", "INVALID_PARAMETER_VALUE")


class PyfuncPredictor:
    """A model that `mlflow.pyfunc` has loaded. See `Predictor`."""

    feature_count = 0
    feature_names: tuple[str, ...] = ()
    takes_tables = True
    takes_texts = False
    takes_dictionaries = True
    compares_names = False  # mlflow does

    def __init__(self, arguments: ModelArguments, found: MlflowModel) -> None:
        """Nothing of the folder is executed unless pickles are allowed. Raises `ServingError`."""
        loader = found.fields["loader_module"]
        check_pickles_allowed(
            arguments,
            f"is loaded by '{loader}' (loader_module in its file MLmodel), and such a model",
            "The flavours lightgbm, onnx, sklearn, xgboost and pytorch have files that need no flag",
        )
        library = pyfunc_library(str(loader))
        with failing_as(functools.partial(_failed_load, arguments.model_name)):
            # mlflow refuses links that lead out of the folder, and `naiad run` links the files of a folder.
            self._model = library.load_model(str((arguments.version_dir / MLMODEL).resolve().parent))

    def predict(self, rows: Any) -> Array | dict[str, Array]:
        with failing_as(_failed_predict):
            return results_of(self._model.predict(rows))


def _failed_load(model: str, error: Exception) -> ServingError:
    if isinstance(error, ImportError):
        return Unavailable(
            f"model '{model}' needs a package that the server's Python does not have: mlflow.pyfunc.load_model: "
            f"{_text(error)}. Install what the folder's requirements.txt has, or serve the folder by a Python model "
            "with an environment of its own (docs/mlflow.md)"
        )
    return InternalError(f"failed to load model '{model}': mlflow.pyfunc.load_model: {_text(error)}")


def _failed_predict(error: Exception) -> ServingError:
    if getattr(error, "error_code", "") in _WRONG_INPUTS:
        return InvalidArgument(f"predict: {' '.join(str(error).split())}")
    return InternalError(f"predict failed: {_text(error)}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def results_of(result: Any) -> Array | dict[str, Array]:
    """Return what a model has returned as an array [rows, ...] of two or more dimensions, or as one for each name.

    A table or a dictionary has names. Raises `ValueError` for a single value, which has no rows.
    """
    if hasattr(result, "columns") and hasattr(result, "to_numpy"):  # a DataFrame
        if not any(isinstance(name, str) for name in result.columns):  # an array in a table
            return _array(result.to_numpy())
        return {str(name): _array(result[name].to_numpy()) for name in result.columns}
    if isinstance(result, dict):
        return {str(name): _array(value) for name, value in result.items()}
    if isinstance(result, list) and result and all(isinstance(each, dict) for each in result):
        names = result[0].keys()
        if all(each.keys() == names for each in result):
            return {str(name): _array([each[name] for each in result]) for name in names}
    return _array(result)


def _array(values: Any) -> Array:
    if hasattr(values, "toarray"):  # a sparse matrix
        values = values.toarray()
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.empty(len(values), object)
        array[:] = values
    if not array.ndim:
        raise ValueError("the model has returned a single value for all rows, and not one for each")
    if array.dtype.kind == "M":
        array = np.datetime_as_string(array).astype(object)
    if array.dtype == object:
        texts = np.empty(array.size, object)
        texts[:] = [each if isinstance(each, (str, bytes)) else _json(each) for each in array.reshape(-1)]
        array = texts.reshape(array.shape)
    return array.reshape(len(array), 1) if array.ndim == 1 else array


def _json(value: Any) -> bytes:
    """Return a value that no datatype of the protocols has, as a text of JSON."""
    return msgspec.json.encode(value, enc_hook=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
