"""The backend of MLflow's model folders: completes their configurations, loads and calls their models.

The flavours sklearn, xgboost, lightgbm and pytorch are called here, as `mlflow.pyfunc` calls them; a model of the
flavour onnx is left to the backend of ONNX Runtime, and all others to the package mlflow.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from backends.base import Backend
from backends.batch_tensors import batch_sizes, execute_alone, gather, requested_outputs, scatter
from backends.mlflow.model_folder import MLMODEL, read_model_folder
from backends.mlflow.outputs import (
    as_configured,
    divided,
    empty_outputs,
    output_parts,
    outputs_of_result,
    outputs_of_schema,
)
from backends.mlflow.predictors import open_predictor
from backends.mlflow.tables import BY_COLUMN, INPUTS, InputPlan, input_plan
from backends.reshape import tensor_specs
from kernel.errors import InternalError, InvalidArgument, ServingError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.base import Config, Host, ModelArguments, PreparedBatch, Timings
    from backends.mlflow.model_folder import MlflowModel
    from backends.mlflow.predictors import Predictor
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array

#: As many rows as cost about as much as a few calls.
MAX_BATCH_SIZE = 1024


class MlflowBackend(Backend):
    """Executes the model of an MLflow folder."""

    shares_worker = True

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._model: PyfuncModel | None = None
        self._onnx: Backend | None = None
        #: The state of the files, and what `complete` has opened from them for the `load` that follows.
        self._opened: tuple[object, MlflowModel, Predictor] | None = None

    def gpu_obstacle(self, arguments: ModelArguments) -> str:
        """As `Backend.gpu_obstacle`."""
        return "the backend 'mlflow' computes on the CPU"

    def complete(self, arguments: ModelArguments) -> Config:
        """See `Backend.complete`. Loads the model unless the configuration is complete."""
        if arguments.config.get("input") and arguments.config.get("output"):
            return dict(arguments.config)
        found = read_model_folder(arguments)
        if found.flavour == "onnx":
            return self._onnx_backend().complete(_onnx_arguments(arguments, found))
        predictor = self._open(arguments, found)
        plan = _plan(arguments, found, predictor)
        config = self._completed(arguments, found, predictor, plan)
        plan.check(arguments.model_name, tensor_specs(config, "input"))
        return config

    def verify(self, arguments: ModelArguments) -> None:
        """See `Backend.verify`. Loads the model, as `load` does."""
        found = read_model_folder(arguments)
        if found.flavour == "onnx":
            self._onnx_backend().verify(_onnx_arguments(arguments, found))
        else:
            PyfuncModel(arguments, found, self._open(arguments, found))

    def load(self, arguments: ModelArguments) -> None:
        if arguments.kind == "GPU":
            raise Unsupported(
                f"instance '{arguments.instance_name}' is of KIND_GPU, and the backend 'mlflow' computes on the CPU. "
                "The ONNX file of a folder runs on a GPU with the backend 'onnxruntime', and its name as "
                "default_model_filename"
            )
        found = read_model_folder(arguments)
        if found.flavour == "onnx":
            onnx = self._onnx_backend()
            onnx.load(_onnx_arguments(arguments, found))
            self._onnx = onnx
            self.pipelines = onnx.pipelines
            return
        self._model = PyfuncModel(arguments, found, self._open(arguments, found))
        self._opened = None

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        if self._onnx is not None:
            self._onnx.execute(requests, timings)
            return
        assert self._model is not None, "execute before load"
        self._model.execute(requests, timings)

    def prepare(self, requests: Sequence[WorkerRequest], timings: Timings) -> PreparedBatch | None:
        assert self._onnx is not None, "only a model of ONNX Runtime pipelines"
        return self._onnx.prepare(requests, timings)

    def finalize(self) -> None:
        """Free the model's memory."""
        if self._onnx is not None:
            self._onnx.finalize()
        self._model = self._onnx = None

    def _open(self, arguments: ModelArguments, found: MlflowModel) -> Predictor:
        """Return what computes the model. If the files are unchanged, it is what `complete` has opened."""
        state = _files_state(arguments, found)
        if self._opened is not None and self._opened[:2] == (state, found):
            return self._opened[2]
        predictor = open_predictor(arguments, found, self._warn)
        self._opened = state, found, predictor
        return predictor

    def _onnx_backend(self) -> Backend:
        from backends.onnxruntime.backend import OnnxRuntimeBackend  # most folders are of other flavours

        return OnnxRuntimeBackend(self.host)

    def _warn(self, line: str) -> None:
        self.host.log("WARNING", line)

    def _completed(
        self, arguments: ModelArguments, found: MlflowModel, predictor: Predictor, plan: InputPlan
    ) -> Config:
        """Return a new configuration with missing batching, inputs and outputs filled in. Raises `ServingError`."""
        config = dict(arguments.config)
        size = (arguments.max_batch_size or MAX_BATCH_SIZE) if plan.has_rows else 0
        config["max_batch_size"] = size
        if size > 1 and not config.keys() & {"sequence_batching", "dynamic_batching"}:
            config["dynamic_batching"] = {}
        batched = size > 0
        if not config.get("input"):
            config["input"] = [each.entry(batched=batched or not plan.has_rows) for each in plan.inputs]
        if not config.get("output"):
            try:
                result = predictor.predict(plan.rows(plan.example()))
            except ServingError as error:  # such as a text that the model does not know
                config["output"] = outputs_of_schema(found.signature.outputs, batched=batched)
                if not config["output"]:
                    raise InvalidArgument(
                        f"the outputs of model '{arguments.model_name}' are not in its file MLmodel, and cannot be "
                        f"found out with a row of zeros: {error.message}. Save it with a signature, or write input "
                        "and output into config.pbtxt"
                    ) from error
                return config
            config["output"], lines = outputs_of_result(
                result, found.signature.outputs, arguments.model_name, batched=batched
            )
            for line in lines:
                self._warn(line)
        return config


def _files_state(arguments: ModelArguments, found: MlflowModel) -> list[object]:
    """Return a value that changes with the files of a folder."""
    state: list[object] = []
    for name in (MLMODEL, found.filename):
        with contextlib.suppress(OSError):  # opening it gives a better error
            status = (arguments.version_dir / name).stat()
            state.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return state


def _plan(arguments: ModelArguments, found: MlflowModel, predictor: Predictor) -> InputPlan:
    choice = arguments.parameter(INPUTS) or ""
    return input_plan(arguments.model_name, found.signature.inputs, predictor, choice)


def _onnx_arguments(arguments: ModelArguments, found: MlflowModel) -> ModelArguments:
    """Return the arguments for the backend of ONNX Runtime. Raises `InvalidArgument`."""
    if arguments.parameter(INPUTS) == BY_COLUMN:
        raise InvalidArgument(
            f"model '{arguments.model_name}' is of the flavour onnx, whose inputs are those of the ONNX file: it "
            f"cannot have an input for each column (parameter {INPUTS})"
        )
    config = {**arguments.config, "default_model_filename": found.filename}
    return msgspec.structs.replace(arguments, config=config)


class PyfuncModel:
    """A model in memory, with the tensors of its configuration."""

    def __init__(self, arguments: ModelArguments, found: MlflowModel, predictor: Predictor) -> None:
        """Raises `InvalidArgument` if the configuration does not fit the model."""
        self._predictor = predictor
        self._plan = _plan(arguments, found, predictor)
        self._max_batch_size = arguments.max_batch_size
        self._inputs = tensor_specs(arguments.config, "input")
        self._outputs = tensor_specs(arguments.config, "output")
        self._plan.check(arguments.model_name, self._inputs)
        self._parts = output_parts(
            list(self._outputs),
            found.signature.outputs,
            arguments.model_name,
            may_have_names=predictor.takes_dictionaries,
        )

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Execute the requests and respond. Raises `ServingError` if a batch of one request fails.

        After a failure of a larger batch, each request is run alone, so that only requests with wrong rows fail.
        """
        try:
            sizes = batch_sizes(requests, self._max_batch_size)
            inputs = gather(requests, self._inputs)
            timings.inputs_ready()
            arrays = self._results(inputs, requested_outputs(requests, self._outputs), sum(sizes))
            timings.inferred()
        except ServingError:
            if len(requests) == 1:
                raise
            execute_alone(self.execute, requests, timings)
            return
        scatter(requests, sizes, arrays, self._outputs)

    def _results(self, inputs: dict[str, Array], names: Sequence[str], row_count: int) -> dict[str, Array]:
        if self._max_batch_size and not row_count:  # which most libraries refuse
            return empty_outputs(self._outputs, names)
        result = self._predictor.predict(self._plan.rows(inputs))
        found = divided(result, self._parts)
        if self._max_batch_size:
            _check_rows(found, row_count)
        return {name: as_configured(found[name], self._outputs[name]) for name in names}


def _check_rows(arrays: Mapping[str, Array], row_count: int) -> None:
    """Raise `InternalError` if a model has not returned a row for each one that it was given."""
    for name, array in arrays.items():
        if len(array) != row_count:
            raise InternalError(
                f"the model returns {len(array)} rows for {row_count} (output '{name}'). A model whose rows are not "
                "independent is served with max_batch_size: 0"
            )
