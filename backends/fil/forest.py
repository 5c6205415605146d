"""A model as Treelite has read it: what it says of itself, and its scores, which are those of Triton's CPU path."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from backends.fil.checkpoint import check_checkpoint
from backends.fil.library import load_failure, treelite_library
from backends.fil.model_file import find_model_file
from kernel.errors import InvalidArgument, Unsupported
from kernel.tree_files import TREE_HEAD_BYTE_SIZE, tree_file_type

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import ModelArguments
    from backends.fil.settings import FilSettings
    from shm.arrays import Array

#: Treelite's numbers of tasks.
_BINARY, _MULTICLASS = 0, 2

#: How many trees the rows for the measurement are made of.
_PROBED_TREES = 64


class ForestSignature(msgspec.Struct, frozen=True):
    """What a model file says of its model."""

    feature_count: int
    #: Scores for each row: the number of classes; 1 for a regression, and for two classes with one score.
    class_count: int
    is_classifier: bool


class Forest:
    """A model in Treelite. Immutable."""

    def __init__(self, model: Any, path: Path, model_type: str, signature: ForestSignature) -> None:
        self._treelite = treelite_library()
        self._model = model
        self.path = path
        #: A key of `TREE_FILE_NAMES`.
        self.model_type = model_type
        self.signature = signature
        #: The type that the model computes with.
        self.dtype = np.dtype(np.float64 if model.input_type == "float64" else np.float32)

    def scores(self, rows: Array, thread_count: int) -> Array:
        """Return the scores of `rows` [rows, features], which have the model's number of features: [rows, classes]."""
        found: Array = self._treelite.gtil.predict(self._model, rows, nthread=thread_count)
        return found.reshape(len(rows), -1)

    def sample_rows(self, count: int) -> Array:
        """Return rows of FP32 [count, features] that take many ways through the trees: about the values that they
        compare with, and some with missing values."""
        features = self.signature.feature_count
        random = np.random.default_rng(0)
        rows = random.standard_normal((count, features)).astype(np.float32)
        found: list[list[float]] = [[] for _ in range(features)]
        for index in range(min(self._model.num_tree, _PROBED_TREES)):
            tree = self._model.get_tree_accessor(index)
            for feature, value in zip(tree.get_field("split_index"), tree.get_field("threshold"), strict=False):
                if 0 <= feature < features and np.isfinite(value):
                    found[feature].append(float(value))
        for feature, values in enumerate(found):
            if values:
                spread = (max(values) - min(values)) or abs(values[0]) or 1.0
                rows[:, feature] = random.choice(values, count) + rows[:, feature] * spread / 8
        rows[count // 2 :][random.random((count - count // 2, features)) < _MISSING_SHARE] = np.nan
        return rows


_MISSING_SHARE = 0.1


def open_forest(arguments: ModelArguments, settings: FilSettings) -> Forest:
    """Read the file of a model. Raises `ServingError`."""
    path, model_type = find_model_file(arguments, settings)
    model = _read(path, model_type, arguments.model_name, settings)
    header = model.get_header_accessor()
    if int(header.get_field("num_target")[0]) != 1:
        raise Unsupported(f"failed to load model '{arguments.model_name}': Multi-target model not supported")
    task = int(header.get_field("task_type")[0])
    class_count = max(1, int(header.get_field("num_class")[0]))
    if task == _MULTICLASS:
        # As in Triton where probabilities are wanted. Otherwise only the order counts, which this does not change;
        # and a model that returns the number of its class has no scores without it.
        several = int(header.get_field("leaf_vector_shape")[1]) > 1
        header.set_field("postprocessor", "identity_multiclass" if several else "softmax")
    signature = ForestSignature(int(model.num_feature), class_count, task in (_BINARY, _MULTICLASS))
    return Forest(model, path, model_type, signature)


def _read(path: Path, model_type: str, model: str, settings: FilSettings) -> Any:
    treelite = treelite_library()
    allow = settings.allows_unknown_fields
    try:
        if model_type == "xgboost_json":
            return treelite.frontend.load_xgboost_model(path, format_choice="json", allow_unknown_field=allow)
        if model_type == "xgboost_ubj":
            return treelite.frontend.load_xgboost_model(path, format_choice="ubjson", allow_unknown_field=allow)
        if model_type == "xgboost":
            return treelite.frontend.load_xgboost_model_legacy_binary(path)
        if model_type == "lightgbm":
            return treelite.frontend.load_lightgbm_model(path)
        check_checkpoint(path.read_bytes())
        return treelite.Model.deserialize(path)
    except InvalidArgument as error:
        raise InvalidArgument(f"failed to load model '{model}': {error.message}{_hint(path, model_type)}") from None
    except (treelite.TreeliteError, OSError, ValueError) as error:
        failure = load_failure(model, error)
        raise type(failure)(failure.message + _hint(path, model_type)) from error


def _hint(path: Path, model_type: str) -> str:
    """Return what helps if the file has another type than the configuration says."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        found = tree_file_type(file.read(TREE_HEAD_BYTE_SIZE))
        if found and found != model_type:
            return f". The file looks like '{found}', and was read as '{model_type}' (parameter model_type)"
    return ""
