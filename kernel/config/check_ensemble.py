"""The rules for the configuration of an ensemble: its steps must connect its inputs to its outputs.

This module does not check whether the models of the steps exist or have matching tensors.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kernel.errors import BadConfig

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig, ModelEnsembling


def check_ensemble(config: ModelConfig) -> None:
    """Check an ensemble's configuration. Raises `BadConfig`."""
    _check_fields(config)
    graph = _Graph(config)
    graph.check_inputs()
    graph.mark_computable()
    graph.check_outputs()
    graph.check_unused()


def _check_fields(config: ModelConfig) -> None:
    if config.instance_group:
        raise BadConfig(f"instance group should not be specified for ensemble '{config.name}'")
    if config.HasField("optimization"):
        raise BadConfig(f"optimization should not be specified for ensemble '{config.name}'")
    if config.model_warmup:
        raise BadConfig(f"model_warmup can not be specified for ensemble '{config.name}'")
    if not config.ensemble_scheduling.step:
        raise BadConfig(f"must specify 'step' for ensemble '{config.name}'")


class _Tensor:
    """A tensor of the ensemble."""

    __slots__ = ("computable", "is_output", "name", "sources", "targets")

    def __init__(self, name: str) -> None:
        self.name = name
        #: The tensor is an output of some step.
        self.is_output = False
        #: The steps can compute the tensor from the ensemble's inputs.
        self.computable = False
        #: The inputs of the step that writes this tensor.
        self.sources: list[_Tensor] = []
        #: The outputs of all steps that read this tensor.
        self.targets: list[_Tensor] = []


class _Graph:
    """The tensors of an ensemble. Every output of a step depends on every input of that step."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._tensors: dict[str, _Tensor] = {}
        for index, step in enumerate(config.ensemble_scheduling.step):
            self._add_step(index, step)

    def _add_step(self, index: int, step: ModelEnsembling.Step) -> None:
        ensemble = self._config.name
        for field, value in (
            ("model_name", step.model_name),
            ("input_map", step.input_map),
            ("output_map", step.output_map),
        ):
            if not value:
                raise BadConfig(f"must specify '{field}' in step {index} of ensemble '{ensemble}'")
        outputs = [self._tensor(name) for _, name in sorted(step.output_map.items())]
        for output in outputs:
            if output.is_output:
                raise BadConfig(
                    f"ensemble tensor '{output.name}' can appear in an output map only once for ensemble "
                    f"'{ensemble}' step {index}"
                )
            output.is_output = True
        for _, name in sorted(step.input_map.items()):
            source = self._tensor(name)
            source.targets += outputs
            for output in outputs:
                output.sources.append(source)

    def _tensor(self, name: str) -> _Tensor:
        return self._tensors.setdefault(name, _Tensor(name))

    def check_inputs(self) -> None:
        for tensor in self._config.input:
            if tensor.name not in self._tensors:
                raise BadConfig(f"ensemble input '{tensor.name}' for ensemble {self._config.name}' is not used")

    def mark_computable(self) -> None:
        """Mark every tensor that the steps can compute from the ensemble's inputs."""
        unvisited = deque(self._tensors[tensor.name] for tensor in self._config.input)
        for tensor in unvisited:
            tensor.computable = True
        while unvisited:
            for target in unvisited.popleft().targets:
                if not target.computable and all(source.computable for source in target.sources):
                    target.computable = True
                    unvisited.append(target)

    def check_outputs(self) -> None:
        ensemble = self._config.name
        for given in self._config.output:
            tensor = self._tensors.get(given.name)
            if tensor is None:
                raise BadConfig(f"ensemble output '{given.name}' for ensemble {ensemble}' is not used")
            if not tensor.computable:
                missing = _unconnected_source(tensor)
                raise BadConfig(
                    f"output '{given.name}' for ensemble '{ensemble}' is not written"
                    + (
                        ""
                        if missing is tensor
                        else f": at least one of its depending tensors, '{missing.name}', is not connected"
                    )
                )

    def check_unused(self) -> None:
        outputs = {tensor.name for tensor in self._config.output}
        for name, tensor in self._tensors.items():
            if name not in outputs and not (tensor.computable and tensor.targets):
                raise BadConfig(f"ensemble tensor '{name}' is unused in ensemble '{self._config.name}'")


def _unconnected_source(tensor: _Tensor) -> _Tensor:
    """Follow the sources that are not computable, and return the last one. A cycle is followed only once."""
    seen: set[str] = set()
    while True:
        upstream = (source for source in tensor.sources if not source.computable and source.name not in seen)
        found = next(upstream, None)
        if found is None:
            return tensor
        seen.add(found.name)
        tensor = found
