"""The backend of scikit-learn: completes configurations from fitted estimators, loads and calls them.

Completes the configuration of a model from its fitted estimator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from backends.base import ModelBackend, is_complete
from backends.batch_tensors import batch_sizes, execute_alone, gather, requested_outputs, scatter
from backends.reshape import tensor_specs
from backends.sklearn.estimator import call, rows_of, signature_of, use_one_thread
from backends.sklearn.library import limit_threads
from backends.sklearn.model_file import file_state, load_estimator
from kernel.errors import InternalError, InvalidArgument, ServingError
from kernel.machine import processor_count
from shm.arrays import NUMPY_TYPES, datatype_of
from shm.datatypes import DATATYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.base import Config, ModelArguments, Timings
    from backends.reshape import TensorShapes
    from backends.sklearn.estimator import EstimatorSignature
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array

#: The parameter that asks for an input for each column, and its values.
_INPUTS, _BY_COLUMN, _AS_ONE = "inputs", "columns", "tensor"


class SklearnBackend(ModelBackend):
    """Executes a fitted estimator, such as a pipeline."""

    shares_worker = True

    #: What `complete` has opened, for the `load` that follows: the path, size and time of its file come first.
    _opened: tuple[object, Any, EstimatorSignature] | None = None

    def gpu_obstacle(self, arguments: ModelArguments) -> str:
        return "the backend 'sklearn' computes on the CPU"

    def complete(self, arguments: ModelArguments) -> Config:
        """See `Backend.complete`. Loads the model unless the configuration is complete."""
        if is_complete(arguments.config):
            return dict(arguments.config)
        estimator, signature = self._open(arguments)
        columns = by_column(arguments, signature)
        batched = {**arguments.config, "max_batch_size": arguments.max_batch_size or MAX_BATCH_SIZE}
        if specs := tensor_specs(batched, "input"):
            check_inputs(arguments.model_name, specs, signature, by_column=columns)
        return autofill(arguments.config, estimator, signature, by_column=columns)

    def verify(self, arguments: ModelArguments) -> None:
        """See `Backend.verify`. Loads the model, as `load` does."""
        EstimatorModel(arguments, *self._open(arguments))

    def load(self, arguments: ModelArguments) -> None:
        limit_threads(processor_count())
        self._model = EstimatorModel(arguments, *self._open(arguments))
        self._opened = None

    def _open(self, arguments: ModelArguments) -> tuple[Any, EstimatorSignature]:
        """Return the estimator. If the file is unchanged, it is what `complete` has opened."""
        file = file_state(arguments)
        if self._opened is not None and self._opened[0] == file:
            return self._opened[1:]
        estimator = load_estimator(arguments, lambda line: self.host.log("WARNING", line))
        signature = signature_of(estimator, arguments.model_name)
        use_one_thread(estimator)
        self._opened = file, estimator, signature
        return estimator, signature


def by_column(arguments: ModelArguments, signature: EstimatorSignature) -> bool:
    """Whether the model has an input for each column. Raises `InvalidArgument`.

    Without the parameter, it has if the inputs have the names of the columns, or if it selects columns by name.
    """
    value = arguments.parameter(_INPUTS)
    if not value:
        configured = {str(each["name"]) for each in arguments.config.get("input", ())}
        if configured:
            return configured == set(signature.feature_names)
        return bool(signature.column_examples)
    if value not in (_BY_COLUMN, _AS_ONE):
        raise InvalidArgument(
            f"parameter '{_INPUTS}' of model '{arguments.model_name}' is '{value}'; expected {_BY_COLUMN} or {_AS_ONE}"
        )
    return value == _BY_COLUMN


def check_inputs(
    model: str, specs: Mapping[str, TensorShapes], signature: EstimatorSignature, *, by_column: bool
) -> None:
    """Raise `InvalidArgument` if the inputs of a configuration do not fit the estimator."""
    if by_column:
        if set(specs) != set(signature.feature_names):
            raise InvalidArgument(
                f"the inputs of model '{model}' are {', '.join(specs)}; expected the columns that it was "
                f"fitted with: {', '.join(signature.feature_names) or 'it has no names of columns'}"
            )
    elif len(specs) != 1:
        raise InvalidArgument(
            f"model '{model}' has {len(specs)} inputs; expected one tensor, or the parameter {_INPUTS}: {_BY_COLUMN}"
        )
    elif signature.feature_count:
        [spec] = specs.values()
        if spec.batched and spec.model_dims not in ((-1,), (signature.feature_count,)):
            raise InvalidArgument(
                f"input '{spec.name}' of model '{model}' has dims {list(spec.model_dims)}; expected "
                f"[{signature.feature_count}], because the model has {signature.feature_count} features"
            )


class EstimatorModel:
    """An estimator in memory, with the tensors of its configuration."""

    def __init__(self, arguments: ModelArguments, estimator: Any, signature: EstimatorSignature) -> None:
        """Raises `InvalidArgument` if the configuration does not fit the estimator."""
        self._estimator = estimator
        self._signature = signature
        self._max_batch_size = arguments.max_batch_size
        self._by_column = by_column(arguments, signature)
        self._inputs = tensor_specs(arguments.config, "input")
        self._outputs = tensor_specs(arguments.config, "output")
        self._check(arguments.model_name)

    def _check(self, model: str) -> None:
        check_inputs(model, self._inputs, self._signature, by_column=self._by_column)
        signature = self._signature
        for name in self._outputs:
            if name not in signature.methods:
                raise InvalidArgument(
                    f"output '{name}' of model '{model}' is no method of "
                    f"{type(self._estimator).__name__}, which has {', '.join(signature.methods)}"
                )

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Execute the requests and respond. Raises `ServingError` if a batch of one request fails.

        After a failure of a larger batch, each request is run alone, so that only requests with wrong rows fail.
        """
        try:
            sizes = batch_sizes(requests, self._max_batch_size)
            columns = gather(requests, self._inputs)
            timings.inputs_ready()
            names = requested_outputs(requests, self._outputs)
            arrays = self._results(columns, names, sum(sizes))
            timings.inferred()
        except ServingError:
            if len(requests) == 1:
                raise
            execute_alone(self.execute, requests, timings)
            return
        scatter(requests, sizes, arrays, self._outputs)

    def _results(self, columns: dict[str, Array], names: Sequence[str], row_count: int) -> dict[str, Array]:
        if self._max_batch_size and not row_count:  # which scikit-learn refuses
            return {name: _empty(self._outputs[name]) for name in names}
        rows = rows_of(columns, self._signature, by_column=self._by_column)
        found = call(self._estimator, names, rows)
        return {name: _converted(array, self._outputs[name]) for name, array in found.items()}


def _empty(spec: TensorShapes) -> Array:
    shape = (0, *(1 if dim == -1 else dim for dim in spec.model_dims))
    return np.zeros(shape, object if spec.datatype == "BYTES" else NUMPY_TYPES[spec.datatype])


def _converted(array: Array, spec: TensorShapes) -> Array:
    """Return a result in the datatype and the shape of the configuration. Raises `InternalError`."""
    if spec.datatype == "BYTES":
        texts = np.empty(array.size, object)
        texts[:] = [each if isinstance(each, bytes) else str(each).encode() for each in array.reshape(-1)]
        return texts.reshape(array.shape)
    wanted = NUMPY_TYPES[spec.datatype]
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise InternalError(
            f"output '{spec.name}' is {array.dtype}, which cannot be {spec.datatype} as the configuration says"
        )
    found = np.ascontiguousarray(array, wanted)
    dims = spec.model_dims
    if not spec.batched and len(dims) == 1 and found.ndim == 2 and found.shape[1] == 1:
        return found.reshape(-1)
    return found


#: The name of the one input of a model without inputs by column.
INPUT = "input"

#: As many rows as cost about as much as a few calls.
MAX_BATCH_SIZE = 1024

#: What is filled in as outputs: the first that a model has of each line.
_OUTPUTS = (("predict", "transform", "score_samples"), ("predict_proba",))


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
        examples = signature.column_examples
        return [
            {
                "name": name,
                "data_type": "TYPE_STRING" if isinstance(examples.get(name), str) else "TYPE_FP64",
                "dims": [1],
            }
            for name in signature.feature_names
        ]
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
        known = signature.column_examples.get(entry["name"])
        if entry["data_type"] == "TYPE_STRING":
            columns[entry["name"]] = np.full(shape, known.encode() if isinstance(known, str) else b"text", object)
        else:
            columns[entry["name"]] = np.full(shape, known if isinstance(known, float) else 0.0)
    return columns
