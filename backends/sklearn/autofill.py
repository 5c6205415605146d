"""Completes the configuration of a model from its fitted estimator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backends.sklearn.estimator import call, rows_of
from kernel.errors import InvalidArgument, ServingError
from shm.arrays import datatype_of
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from backends.base import Config
    from backends.sklearn.estimator import EstimatorSignature
    from shm.arrays import Array

#: The name of the one input of a model without inputs by column.
INPUT = "input"

#: As many rows as cost about as much as a few calls.
MAX_BATCH_SIZE = 1024

#: What is filled in as outputs: the first that a model has of each line.
_OUTPUTS = (("predict", "transform", "score_samples"), ("predict_proba",))


def is_complete(config: Config) -> bool:
    """Return whether the configuration has inputs and outputs. Then nothing is filled in, not even max_batch_size."""
    return bool(config.get("input")) and bool(config.get("output"))


def autofill(config: Config, estimator: Any, signature: EstimatorSignature, *, by_column: bool) -> Config:
    """Return a new configuration with missing batching, inputs and outputs filled in.

    Outputs have the datatypes and widths of what the estimator returns for a row of zeros, or for a text. Raises
    `ServingError`.
    """
    filled = dict(config)
    filled["max_batch_size"] = size = int(config.get("max_batch_size", 0)) or MAX_BATCH_SIZE
    if size > 1 and not config.keys() & {"sequence_batching", "dynamic_batching"}:
        filled["dynamic_batching"] = {}
    if not config.get("input"):
        filled["input"] = _inputs(config["name"], signature, by_column=by_column)
    if not config.get("output"):
        filled["output"] = _outputs(filled, estimator, signature, by_column=by_column)
    return filled


def _inputs(model: str, signature: EstimatorSignature, *, by_column: bool) -> list[dict[str, Any]]:
    if by_column:
        if not signature.feature_names:
            raise InvalidArgument(
                f"model '{model}' cannot have an input for each column (parameter inputs): it was fitted with an "
                "array, whose columns have no names"
            )
        return [{"name": name, "data_type": "TYPE_FP64", "dims": [1]} for name in signature.feature_names]
    if not signature.feature_count:
        return [{"name": INPUT, "data_type": "TYPE_STRING", "dims": [1]}]
    return [{"name": INPUT, "data_type": "TYPE_FP64", "dims": [signature.feature_count]}]


def _outputs(config: Config, estimator: Any, signature: EstimatorSignature, *, by_column: bool) -> list[dict[str, Any]]:
    found = []
    for names in _OUTPUTS:
        method = next((name for name in names if name in signature.methods), None)
        if method is None:
            continue
        try:
            array = call(estimator, [method], rows_of(_example(config, signature), signature, by_column=by_column))[
                method
            ]
        except ServingError as error:
            if method == "predict_proba":
                continue  # it exists for some settings alone, or is a list for several targets
            raise InvalidArgument(
                f"the outputs of model '{config['name']}' cannot be found out with a row of zeros: {error.message}. "
                "Write input and output into config.pbtxt"
            ) from error
        datatype = "BYTES" if array.dtype.kind in "OUS" else datatype_of(array)
        if datatype is None:
            raise InvalidArgument(f"output '{method}' of model '{config['name']}' is of the type {array.dtype}")
        found.append({"name": method, "data_type": DATATYPES[datatype].config_name, "dims": list(array.shape[1:])})
    return found


def _example(config: Config, signature: EstimatorSignature) -> dict[str, Array]:
    """Return one row for the inputs of a configuration."""
    columns: dict[str, Array] = {}
    variable = signature.feature_count if len(config["input"]) == 1 else 1
    for entry in config["input"]:
        shape = (1, *(max(variable, 1) if int(dim) == -1 else int(dim) for dim in entry["dims"]))
        text = entry["data_type"] == "TYPE_STRING"
        columns[entry["name"]] = np.full(shape, b"text", object) if text else np.zeros(shape)
    return columns
