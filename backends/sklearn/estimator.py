"""A fitted estimator: what it can do, what it wants, and its calls."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from backends.sklearn.library import optional
from kernel.errors import InternalError, InvalidArgument, ServingError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shm.arrays import Array

#: Methods that can be outputs, by the names that MLServer has for the first three.
METHODS = ("predict", "predict_proba", "transform", "decision_function", "score_samples")

#: The most elements of a list that may be estimators: longer ones are words, or rows.
_MOST_PARTS = 10_000


class EstimatorSignature(msgspec.Struct, frozen=True):
    """What a fitted estimator says of itself."""

    #: How many columns it has been fitted with; 0 for a model of texts.
    feature_count: int
    #: The names of the columns; empty if it was fitted with an array.
    feature_names: tuple[str, ...]
    #: Of `METHODS`.
    methods: tuple[str, ...]


def signature_of(estimator: Any, model: str) -> EstimatorSignature:
    """Return the signature of an estimator. Raises `InvalidArgument` for an object that is none."""
    methods = tuple(name for name in METHODS if callable(getattr(estimator, name, None)))
    if not methods:
        raise InvalidArgument(
            f"the file of model '{model}' has an object of "
            f"{type(estimator).__module__}.{type(estimator).__qualname__}, which has none of the methods "
            f"{', '.join(METHODS)}"
        )
    names = getattr(estimator, "feature_names_in_", ())
    count = int(getattr(estimator, "n_features_in_", 0) or 0)
    return EstimatorSignature(count, tuple(str(name) for name in names), methods)


def use_one_thread(estimator: Any) -> None:
    """Set `n_jobs` to 1 in an estimator and its parts: joblib would start processes or threads for each call.

    The fitted parts of a search or a vote are in attributes that `get_params` does not show.
    """
    waiting, seen = [estimator], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (list, tuple, dict)):
            if len(part) <= _MOST_PARTS:
                waiting.extend(part.values() if isinstance(part, dict) else part)
        elif hasattr(type(part), "get_params") or type(part).__module__.startswith("sklearn."):
            attributes = getattr(part, "__dict__", {})
            if attributes.get("n_jobs") not in (None, 1):
                part.n_jobs = 1
            waiting.extend(attributes.values())


def rows_of(columns: Mapping[str, Array], signature: EstimatorSignature, *, by_column: bool) -> Any:
    """Return what an estimator is called with: one array, texts, or a table of the `columns` in their order."""
    if not by_column:
        [array] = columns.values()
        if array.dtype == object:
            texts = _texts(array)
            return texts.reshape(-1) if not signature.feature_count else texts
        return array
    table = {name: _texts(array).reshape(-1) for name, array in columns.items()}
    order = list(signature.feature_names)
    pandas = optional("pandas")
    if pandas is not None:
        return pandas.DataFrame(table, columns=order)
    numbers = all(array.dtype != object for array in table.values())
    return np.stack([table[name] if numbers else table[name].astype(object) for name in order], axis=1)


def _texts(array: Array) -> Array:
    """Return an array of bytes as an array of texts. Raises `InvalidArgument`."""
    if array.dtype != object:
        return array
    try:
        flat = [each.decode() for each in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"a text is not UTF-8: {error}") from error
    found = np.empty(len(flat), object)
    found[:] = flat
    return found.reshape(array.shape)


def call(estimator: Any, methods: Sequence[str], rows: Any) -> dict[str, Array]:
    """Return the results of `methods`, each as an array [rows, ...]. Raises `ServingError`.

    What scikit-learn says of wrong rows is INVALID_ARG.
    """
    found = {}
    for method in methods:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="X (does not have|has) .*feature names")
                result = getattr(estimator, method)(rows)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"{method}: {error}") from error
        except ServingError:
            raise
        except Exception as error:
            raise InternalError(f"{method} failed: {type(error).__name__}: {error}") from error
        found[method] = _as_array(method, result)
    return found


def _as_array(method: str, result: Any) -> Array:
    if isinstance(result, list):
        raise InvalidArgument(
            f"{method} returns a list of {len(result)} arrays; models of several targets have none here"
        )
    if hasattr(result, "toarray"):  # a sparse matrix
        result = result.toarray()
    array = np.asarray(result)
    return array.reshape(len(array), 1) if array.ndim == 1 else array
