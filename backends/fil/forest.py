"""A model as Treelite has read it: what it says of itself, and its scores, which are those of Triton's CPU path.

Finds the file of a model in its version folder, and tells its format from its name or its first bytes.

Checks that a Treelite checkpoint is whole. Pure.

Treelite trusts the lengths in a checkpoint: from a damaged one it reads for hours, or past the end. The layout is that
of Treelite's model specification, serialization version 4: numbers, and arrays with their length in front.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from backends.fil.library import load_failure, treelite_library
from kernel.errors import InvalidArgument, Unavailable, Unsupported
from kernel.tree_files import TREE_FILE_NAMES, TREE_HEAD_BYTE_SIZE, tree_file_type

if TYPE_CHECKING:
    from pathlib import Path

    from backends.base import ModelArguments
    from backends.fil.settings import FilSettings
    from shm.arrays import Array

#: Struct formats of numbers by their letter; `T` is the type of thresholds, `L` that of leaf values.
_HEADER_ARRAYS = ("i", "i", "i", "i")  # num_class, leaf_vector_shape, target_id, class_id

_TREE_ARRAYS = "biiiBLTbBLQQIQQQBdBdB"

_SIZES = {"b": 1, "B": 1, "i": 4, "I": 4, "Q": 8, "d": 8, "f": 4}

_FLOATS = {2: "f", 3: "d"}


class _CheckpointReader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def number(self, kind: str) -> int:
        size = _SIZES[kind]
        if self.left < size:
            raise InvalidArgument("the checkpoint ends too early")
        (value,) = struct.unpack_from(f"<{kind}", self._data, self._at)
        self._at += size
        return int(value)

    def array(self, kind: str) -> None:
        byte_size = self.number("Q") * _SIZES[kind]
        if self.left < byte_size:
            raise InvalidArgument("the checkpoint ends too early, or a length in it is wrong")
        self._at += byte_size

    def optional_fields(self) -> None:
        if self.number("i"):
            raise InvalidArgument("the checkpoint has fields of a later version")


def check_checkpoint(data: bytes) -> None:
    """Raise `InvalidArgument` if `data` is not a whole checkpoint. Versions before 4 are left to Treelite."""
    reader = _CheckpointReader(data)
    major = reader.number("i")
    reader.number("i")
    reader.number("i")
    if major != 4:
        return
    threshold, leaf = reader.number("B"), reader.number("B")
    if threshold not in _FLOATS or leaf not in _FLOATS:
        raise InvalidArgument("the checkpoint has an unknown type of numbers")
    tree_count = reader.number("Q")
    for kind in "iBBi":  # num_feature, task_type, average_tree_output, num_target
        reader.number(kind)
    for kind in _HEADER_ARRAYS:
        reader.array(kind)
    reader.array("B")  # postprocessor
    reader.number("i")  # sigmoid_alpha, of which only the size counts
    reader.number("i")  # ratio_c
    reader.array("d")  # base_scores
    reader.array("B")  # attributes
    reader.optional_fields()
    kinds = [{"T": _FLOATS[threshold], "L": _FLOATS[leaf]}.get(kind, kind) for kind in _TREE_ARRAYS]
    for _ in range(tree_count):  # each has at least its numbers, so that a wrong count ends soon
        reader.number("i")  # num_nodes
        reader.number("B")  # has_categorical_split
        for kind in kinds:
            reader.array(kind)
        reader.optional_fields()
        reader.optional_fields()
    if reader.left:
        raise InvalidArgument(f"the checkpoint has {reader.left} bytes too many")


#: Names that are looked for if the configuration names neither file nor type: Triton's, MLServer's and KServe's.
_CANDIDATES = ("xgboost.json", "xgboost.ubj", "xgboost.model", "model.txt", "checkpoint.tl",
               "model.json", "model.ubj", "model.bst", "model.lgb")  # fmt: skip


def find_model_file(arguments: ModelArguments, settings: FilSettings) -> tuple[Path, str]:
    """Return the path of the model's file and its type, a key of `TREE_FILE_NAMES`. Raises `ServingError`."""
    folder = arguments.version_dir
    named = str(arguments.config.get("default_model_filename") or "")
    if named or settings.model_type:
        path = folder / (named or TREE_FILE_NAMES[settings.model_type])
        if not path.is_file():
            raise Unavailable(f"unable to find '{path}' for model '{arguments.model_name}'")
    else:
        present = [folder / name for name in _CANDIDATES if (folder / name).is_file()]
        if not present:
            raise Unavailable(
                f"unable to find a file for model '{arguments.model_name}' in '{folder}': expected one of "
                f"{', '.join(_CANDIDATES)}, or default_model_filename in the configuration"
            )
        path = present[0]
    return path, settings.model_type or _type_of(path, arguments.model_name)


def _type_of(path: Path, model: str) -> str:
    """Return the type of a file by its content. Raises `InvalidArgument`."""
    try:
        with path.open("rb") as file:
            found = tree_file_type(file.read(TREE_HEAD_BYTE_SIZE))
    except OSError as error:
        raise Unavailable(f"'{path}' of model '{model}' cannot be read: {error.strerror}") from error
    if not found and path.name == TREE_FILE_NAMES["xgboost"]:
        return "xgboost"  # files of very old versions begin with a number
    if not found:
        raise InvalidArgument(
            f"'{path}' of model '{model}' is no file of XGBoost (JSON, UBJSON), LightGBM (text) or Treelite "
            f"(checkpoint); if it is one, name its type in the parameter model_type ({', '.join(TREE_FILE_NAMES)})"
        )
    return found


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
