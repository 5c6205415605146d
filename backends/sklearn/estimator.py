"""A fitted estimator: what it can do, what it wants, and its calls."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from backends.sklearn.library import optional
from kernel.errors import InternalError, InvalidArgument, ServingError, failing_as

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shm.arrays import Array

#: Methods that can be outputs, by the names that MLServer has for the first three.
METHODS = ("predict", "predict_proba", "transform", "decision_function", "score_samples")

#: Longer lists are not searched for estimators: their elements are words, or rows.
_MOST_PARTS = 10_000

_NUMBERS = (int, float, np.number, np.bool_)


class EstimatorSignature(msgspec.Struct, frozen=True):
    """What a fitted estimator says of itself."""

    #: How many columns it has been fitted with; 0 for a model of texts.
    feature_count: int
    #: The names of the columns; empty if it was fitted with an array.
    feature_names: tuple[str, ...]
    #: Of `METHODS`.
    methods: tuple[str, ...]
    #: Column → a value that it knows, if the estimator selects columns by their names: it then takes tables only.
    column_examples: dict[str, str | float]


def signature_of(estimator: Any, model: str) -> EstimatorSignature:
    """Return the signature of an estimator. Raises `InvalidArgument` for an object that is none."""
    methods = tuple(name for name in METHODS if callable(getattr(estimator, name, None)))
    if not methods:
        raise InvalidArgument(
            f"the file of model '{model}' has an object of "
            f"{type(estimator).__module__}.{type(estimator).__qualname__}, which has none of the methods "
            f"{', '.join(METHODS)}"
        )
    names = tuple(str(name) for name in getattr(estimator, "feature_names_in_", ()))
    count = int(getattr(estimator, "n_features_in_", 0) or 0)
    return EstimatorSignature(count, names, methods, _column_examples(estimator, names) if names else {})


def use_one_thread(estimator: Any) -> None:
    """Set `n_jobs` to 1 in an estimator and its parts: joblib would start processes or threads for each call."""
    for part in _parts(estimator):
        if vars(part).get("n_jobs") not in (None, 1):
            part.n_jobs = 1


def _parts(estimator: Any) -> Iterator[Any]:
    """Yield an estimator and all in its attributes, such as the fitted parts of a search, which `get_params` lacks."""
    waiting, seen = [estimator], set[int]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, (list, tuple, dict)):
            if len(part) <= _MOST_PARTS:
                waiting.extend(part.values() if isinstance(part, dict) else part)
        elif hasattr(part, "__dict__") and (
            hasattr(type(part), "get_params") or type(part).__module__.startswith("sklearn.")
        ):
            yield part
            waiting.extend(vars(part).values())


def _column_examples(estimator: Any, names: Sequence[str]) -> dict[str, str | float]:
    """Return column → a value that the estimator knows, for all columns `names`, if it selects some by their names.

    A column is of texts if an encoder or imputer was fitted with texts.
    """
    found: dict[str, str | float] = {}
    for part in _parts(estimator):
        for _, transformer, selected in getattr(part, "transformers_", ()):
            columns = [selected] if isinstance(selected, str) else selected
            if not hasattr(columns, "__iter__") or not all(isinstance(each, str) and each in names for each in columns):
                continue  # numbers of columns, a slice, or a mask
            for step in _parts(transformer):
                if hasattr(step, "vocabulary_"):
                    found.update(dict.fromkeys(columns, "text"))
                for column, value in zip(columns, _known_values(step), strict=False):
                    found.setdefault(column, value)
            for column in columns:
                found.setdefault(column, 0.0)
    return {name: found.get(name, 0.0) for name in names} if found else {}


def _known_values(step: Any) -> list[str | float]:
    """Return a value for each column that an encoder or imputer was fitted with; none for another transformer."""
    values = [each[0] for each in getattr(step, "categories_", ()) if len(each)]
    values = values or list(getattr(step, "statistics_", ()))
    return [each if isinstance(each, str) else float(each) if isinstance(each, _NUMBERS) else 0.0 for each in values]


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
        with failing_as(partial(_failure, method), passes=ServingError), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="X (does not have|has) .*feature names")
            result = getattr(estimator, method)(rows)
        found[method] = _as_array(method, result)
    return found


def _failure(method: str, error: Exception) -> ServingError:
    if isinstance(error, (ValueError, TypeError)):
        return InvalidArgument(f"{method}: {error}")
    return InternalError(f"{method} failed: {type(error).__name__}: {error}")


def _as_array(method: str, result: Any) -> Array:
    if isinstance(result, list):
        raise InvalidArgument(
            f"{method} returns a list of {len(result)} arrays; models of several targets have none here"
        )
    if hasattr(result, "toarray"):  # a sparse matrix
        result = result.toarray()
    array = np.asarray(result)
    return array.reshape(len(array), 1) if array.ndim == 1 else array
