"""The FIL backend: completes configurations from files of trees, and loads and executes such models on the CPU.

Completes the configuration of a model from its file. Triton's FIL backend completes nothing. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.base import ModelBackend, is_complete
from backends.batch_tensors import batch_sizes, gather
from backends.fil.engines import chosen_engine, explainer_of
from backends.fil.forest import open_forest
from backends.fil.outputs import (
    INPUT,
    OUTPUT,
    SHAP_OUTPUT,
    OutputRule,
    check_input,
    client_shape,
    configured_rule,
    shap_width,
)
from backends.fil.settings import fil_settings, ignored_parameters
from backends.reshape import tensor_specs
from backends.worker.request import OutputValue
from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.base import Config, ModelArguments, Timings
    from backends.fil.engines import Engine, LightgbmEngine, XgboostEngine
    from backends.fil.forest import Forest, ForestSignature
    from backends.fil.settings import FilSettings
    from backends.worker.request import WorkerRequest
    from shm.arrays import Array


class FilBackend(ModelBackend):
    """Executes a model of trees."""

    shares_worker = True

    def gpu_obstacle(self, arguments: ModelArguments) -> str:
        return "the backend 'fil' computes on the CPU"

    def complete(self, arguments: ModelArguments) -> Config:
        """See `Backend.complete`. Reads the model file unless the configuration is complete."""
        if is_complete(arguments.config):
            return dict(arguments.config)
        settings = fil_settings(arguments)
        return autofill(arguments.config, open_forest(arguments, settings).signature, settings)

    def verify(self, arguments: ModelArguments) -> None:
        """See `Backend.verify`. Reads the model file, as `load` does."""
        settings = fil_settings(arguments)
        forest = open_forest(arguments, settings)
        ForestModel(arguments, forest, settings)

    def load(self, arguments: ModelArguments) -> None:
        settings = fil_settings(arguments)
        for line in ignored_parameters(arguments):
            self.host.log("WARNING", line)
        if arguments.kind == "GPU":
            self.host.log(
                "WARNING",
                f"{arguments.instance_name} is of KIND_GPU, and runs on the CPU: the backend 'fil' has no GPU",
            )
        forest = open_forest(arguments, settings)
        model = ForestModel(arguments, forest, settings)
        model.engine, reason = chosen_engine(arguments.model_name, forest, settings)
        self.host.log("INFO", f"{arguments.instance_name} computes with {model.engine.name} ({reason})")
        self._model = model


class ForestModel:
    """A model in memory, with the tensors of its configuration."""

    engine: Engine

    def __init__(self, arguments: ModelArguments, forest: Forest, settings: FilSettings) -> None:
        """Raises `ServingError` if the configuration does not fit the model."""
        name, signature = arguments.model_name, forest.signature
        self._max_batch_size = arguments.max_batch_size
        self._inputs = tensor_specs(arguments.config, "input")
        self._outputs = tensor_specs(arguments.config, "output")
        self._input = check_input(name, signature, self._inputs)
        self._rule: OutputRule = configured_rule(name, signature, settings, self._outputs)
        self._feature_count = signature.feature_count
        self._shap_width = shap_width(signature)
        self._explainer: XgboostEngine | LightgbmEngine | None = None
        self._class_count = signature.class_count
        if SHAP_OUTPUT in self._outputs:
            self._explainer = explainer_of(name, forest, settings)

    def execute(self, requests: Sequence[WorkerRequest], timings: Timings) -> None:
        """Execute the requests and respond. Raises `ServingError` if the rows have the wrong width."""
        sizes = batch_sizes(requests, self._max_batch_size)
        rows = self._rows(requests)
        if not self._max_batch_size:
            sizes = [len(rows)]
        timings.inputs_ready()
        wanted = {name for request in requests for name in self._outputs if request.wants(name)}
        arrays: dict[str, tuple[Array, int]] = {}
        if OUTPUT in wanted:
            arrays[OUTPUT] = self._rule.output(self._scores(rows)), self._rule.width
        if SHAP_OUTPUT in wanted:
            arrays[SHAP_OUTPUT] = self._contributions(rows), self._shap_width
        timings.inferred()
        start = 0
        for request, size in zip(requests, sizes, strict=True):
            outputs = [
                OutputValue(name, "FP32", array[start : start + size].reshape(client_shape(spec, size, width)))
                for name, (array, width) in arrays.items()
                if request.wants(name) and (spec := self._outputs[name])
            ]
            start += size
            request.respond(outputs)

    def _rows(self, requests: Sequence[WorkerRequest]) -> Array:
        """Return the rows of all requests. Treelite reads past the end of narrower ones."""
        array = gather(requests, self._inputs)[self._input.name]
        if array.ndim != 2 or array.shape[1] != self._feature_count:
            raise InvalidArgument(
                f"input '{self._input.name}' has shape {list(array.shape)}; expected {self._feature_count} features in "
                "its last dimension"
            )
        return np.ascontiguousarray(array)

    def _scores(self, rows: Array) -> Array:
        if not len(rows):
            return np.zeros((0, self._class_count), np.float32)
        return self.engine.scores(rows)

    def _contributions(self, rows: Array) -> Array:
        if not len(rows):
            return np.zeros((0, self._shap_width), np.float32)
        assert self._explainer is not None
        return np.ascontiguousarray(self._explainer.contributions(rows), np.float32)


#: The rows of a batch that costs about as much as a few requests.
MAX_BATCH_SIZE = 4096


def autofill(config: Config, signature: ForestSignature, settings: FilSettings) -> Config:
    """Return a new configuration with missing batching, inputs and outputs filled in."""
    filled = dict(config)
    filled["max_batch_size"] = size = int(config.get("max_batch_size", 0)) or MAX_BATCH_SIZE
    if size > 1 and not config.keys() & {"sequence_batching", "dynamic_batching"}:
        filled["dynamic_batching"] = {}
    if not config.get("input"):
        filled["input"] = [{"name": INPUT, "data_type": "TYPE_FP32", "dims": [signature.feature_count]}]
    if not config.get("output"):
        width = OutputRule(signature, settings).width
        filled["output"] = [{"name": OUTPUT, "data_type": "TYPE_FP32", "dims": [width]}]
    return filled
