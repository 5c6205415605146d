"""Connects models one after the other to an ensemble. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.check_steps import check_steps
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernel.config.generated.model_config_pb2 import ModelEnsembling, ModelInput, ModelOutput


def chain(name: str, models: Sequence[ModelConfig]) -> ModelConfig:
    """Return the configuration of an ensemble with a step for each of `models`, which are complete.

    An input of a step is the earlier output of the same name; or the only output of the step before, if it is the
    step's only input; else an input of the ensemble. The outputs of the last step are those of the ensemble. Raises
    `BadConfig` if a step would get nothing of the step before, or the tensors do not fit.
    """
    config = ModelConfig(name=name, platform="ensemble")
    batching = all(model.max_batch_size > 0 for model in models)
    config.max_batch_size = min(model.max_batch_size for model in models) if batching else 0
    chained = _Chain(config, batching=batching)
    for model in models:
        chained.add(model)
    chained.finish(models[-1])
    config.model_transaction_policy.decoupled = check_steps(config, {model.name: model for model in models})
    if not config.model_transaction_policy.decoupled:
        config.ClearField("model_transaction_policy")
    return config


class _Chain:
    """The steps so far."""

    def __init__(self, config: ModelConfig, *, batching: bool) -> None:
        self._config = config
        self._batching = batching
        #: Tensors of the ensemble that steps have made, and that its clients give.
        self._made: set[str] = set()
        self._given: set[str] = set()
        #: The last step, its model, and output → tensor of the ensemble.
        self._last: tuple[ModelEnsembling.Step, ModelConfig, dict[str, str]] | None = None

    def add(self, model: ModelConfig) -> None:
        """Add a step for `model`."""
        step = self._config.ensemble_scheduling.step.add(model_name=model.name, model_version=-1)
        used: set[str] = set()
        for tensor in model.input:
            source = self._source(model, tensor)
            if source is not None:
                step.input_map[tensor.name] = source
                used.add(source)
            elif not tensor.optional:
                step.input_map[tensor.name] = self._give(model, tensor)
        if self._last is not None:
            self._keep_used(model, used)
        made = {tensor.name: self._free_name(model, tensor.name) for tensor in model.output}
        self._made |= set(made.values())
        self._last = step, model, made

    def _source(self, model: ModelConfig, tensor: ModelInput) -> str | None:
        """Return the tensor that earlier steps have made for an input, or None."""
        if self._last is None:
            return None
        _, _, made = self._last
        if tensor.name in made:
            return made[tensor.name]
        required = [each for each in model.input if not each.optional]
        if len(made) == 1 and len(required) == 1 and not tensor.optional:
            return next(iter(made.values()))
        return tensor.name if tensor.name in self._made else None

    def _keep_used(self, model: ModelConfig, used: set[str]) -> None:
        """Map only those outputs of the last step that this step uses. Later steps may use them, too."""
        assert self._last is not None
        step, before, made = self._last
        kept = {output: tensor for output, tensor in made.items() if tensor in used}
        if not kept:
            raise BadConfig(
                f"no output of '{before.name}' ({_names(before.output)}) is an input of '{model.name}' "
                f"({_names(model.input)}): name them alike, or write the input_map yourself"
            )
        for output, tensor in kept.items():
            step.output_map[output] = tensor
        self._made -= set(made.values()) - set(kept.values())

    def _give(self, model: ModelConfig, tensor: ModelInput) -> str:
        """Make an input of the ensemble for an input of a step, and return its name."""
        if tensor.name not in self._given:
            name = self._free_name(model, tensor.name)
            self._given.add(name)
            self._config.input.add(name=name, data_type=tensor.data_type, dims=self._dims(model, tensor))
            return name
        return tensor.name

    def _dims(self, model: ModelConfig, tensor: ModelInput | ModelOutput) -> list[int]:
        rows = [-1] if model.max_batch_size > 0 and not self._batching else []
        return [*rows, *tensor.dims]

    def _free_name(self, model: ModelConfig, name: str) -> str:
        return f"{model.name}_{name}" if name in self._made | self._given else name

    def finish(self, model: ModelConfig) -> None:
        """Make the outputs of the last step, which is that of `model`, those of the ensemble."""
        assert self._last is not None
        step, _, made = self._last
        for tensor in model.output:
            step.output_map[tensor.name] = made[tensor.name]
            self._config.output.add(name=made[tensor.name], data_type=tensor.data_type, dims=self._dims(model, tensor))


def _names(tensors: Sequence[ModelInput] | Sequence[ModelOutput]) -> str:
    return ", ".join(tensor.name for tensor in tensors)
