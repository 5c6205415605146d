"""The rules for the configuration of an ensemble: its steps must connect its inputs to its outputs.

The first half needs no other model. The second half has the rules between an ensemble and the models of its steps:
batch sizes, tensors, and streams of responses. Pure.

Order and texts are Triton's (`ValidateEnsembleConfig` in core's ensemble_utils.cc).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import DataType
from kernel.errors import BadConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kernel.config.generated.model_config_pb2 import ModelConfig, ModelEnsembling, ModelInput, ModelOutput


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


def check_steps(config: ModelConfig, models: Mapping[str, ModelConfig]) -> bool:
    """Check a checked ensemble against the configurations of its models, by name. Raises `BadConfig`.

    Returns whether the ensemble is decoupled: one of its models is.
    """
    graph = _StepGraph(config)
    for step in config.ensemble_scheduling.step:
        model = models[step.model_name]
        _check_batch_size(config, model)
        graph.add(step, model)
    return graph.label_streams()


def _check_batch_size(config: ModelConfig, model: ModelConfig) -> None:
    """A model without batching may be a step of an ensemble with batching: see `schedulers/ensemble/run.py`."""
    if 0 < model.max_batch_size < config.max_batch_size:
        raise BadConfig(
            f"ensemble {config.name} allows maximum batch size {config.max_batch_size}, but it contains model "
            f"{model.name} which only allows maximum batch size to be {model.max_batch_size}"
        )


class _Step:
    """A step that is executed: all its outputs belong to one stream of responses."""

    def __init__(self) -> None:
        #: The number of the stream, once it is known.
        self.stream: int | None = None


def _type_name(data_type: int) -> str:
    # A protobuf enum field may contain a number that has no name. Triton then prints an empty name.
    return DataType.Name(data_type) if data_type in DataType.values() else ""


class _TypedTensor:
    """A tensor of the ensemble, with what the first model that names it says of its type."""

    def __init__(self, model: str, data_type: int, dims: Sequence[int], *, batching: bool) -> None:
        self.model = model
        self.data_type = data_type
        self.dims = list(dims)
        self.full_dims = [-1, *dims] if batching else self.dims
        self.decoupled = False
        self.visited = False
        #: Which stream of responses the tensor belongs to; 0 for the request itself.
        self.stream = 0
        self.sources: list[_TypedTensor] = []
        self.targets: list[_TypedTensor] = []
        self.step: _Step | None = None

    def check_same(self, other: _TypedTensor, where: str) -> None:
        """Check that `other` can be the same tensor. Raises `BadConfig`."""
        if self.data_type != other.data_type:
            raise BadConfig(
                f"{where}inconsistent data type: {_type_name(self.data_type)} is inferred from model {self.model} "
                f"while {_type_name(other.data_type)} is inferred from model {other.model}"
            )
        # [-1,2] of a model without batching is the same tensor as [2] of one with batching.
        if not (_match(self.dims, other.dims) or _match(self.full_dims, other.full_dims)):
            raise BadConfig(
                f"{where}inconsistent shape: {_text(self.full_dims)} is inferred from model {self.model} while "
                f"{_text(other.full_dims)} is inferred from model {other.model}"
            )


class _StepGraph:
    """The tensors of an ensemble and how the steps connect them."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._inputs: list[_TypedTensor] = []
        self._tensors: dict[str, _TypedTensor] = {}
        batching = config.max_batch_size > 0
        for tensor in config.input:
            node = self._tensors.setdefault(tensor.name, _tensor_of(config.name, tensor, batching=batching))
            self._inputs.append(node)
        sink = _TypedTensor(config.name, 0, [], batching=False)
        for output in config.output:
            node = self._tensors.setdefault(output.name, _tensor_of(config.name, output, batching=batching))
            sink.sources.append(node)
            node.targets.append(sink)

    def add(self, step: ModelEnsembling.Step, model: ModelConfig) -> None:
        """Add the tensors of a step. Raises `BadConfig`."""
        where = f"in ensemble {self._config.name}, "
        batching = model.max_batch_size > 0
        inputs = {tensor.name: tensor for tensor in model.input}
        outputs = {tensor.name: tensor for tensor in model.output}
        for name, tensor in sorted(step.input_map.items()):
            if name not in inputs:
                raise BadConfig(
                    f"{where}ensemble tensor {tensor} is mapping to non-existing input {name} in model "
                    f"{step.model_name}"
                )
        for name, given in inputs.items():
            if name in step.input_map:
                self._note(step.input_map[name], step.model_name, given, where, batching=batching)
            elif not given.optional:
                raise BadConfig(f"{where}input {name} in model {model.name} is not mapped to any ensemble tensors")
        for name, tensor in sorted(step.output_map.items()):
            if name not in outputs:
                raise BadConfig(
                    f"{where}ensemble tensor {tensor} is mapped from non-existing output {name} in model "
                    f"{step.model_name}"
                )
        made = _Step()
        for name, tensor in sorted(step.output_map.items()):
            node = self._note(tensor, step.model_name, outputs[name], where, batching=batching)
            node.step = made
            node.decoupled = model.model_transaction_policy.decoupled
            for source in step.input_map.values():
                node.sources.append(self._tensors[source])
                self._tensors[source].targets.append(node)

    def _note(
        self, tensor: str, model: str, given: ModelInput | ModelOutput, where: str, *, batching: bool
    ) -> _TypedTensor:
        """Return the ensemble's tensor, which `given` of a model must fit. Raises `BadConfig`."""
        # Not `_tensor_of`: what the client of this model sees has the shape before `reshape`.
        found = _TypedTensor(model, given.data_type, given.dims, batching=batching)
        known = self._tensors.setdefault(tensor, found)
        if known is not found:
            known.check_same(found, f"{where}ensemble tensor {tensor}: ")
        return known

    def label_streams(self) -> bool:
        """Find the stream of responses of each tensor. Returns whether there is one. Raises `BadConfig`.

        The inputs of a step must belong to the same stream: nothing says which responses of two streams belong
        together.
        """
        streams = 0
        unvisited = deque(self._inputs)
        for tensor in self._inputs:
            tensor.visited = True
        while unvisited:
            for target in unvisited.popleft().targets:
                if target.visited or not all(source.visited for source in target.sources):
                    continue
                before = target.sources[0].stream
                if any(source.stream != before for source in target.sources):
                    raise BadConfig(
                        f"in ensemble {self._config.name}, step of model '{target.model}' receives inputs originated "
                        "from different decoupled models"
                    )
                target.stream = before
                if target.step is not None:
                    if target.step.stream is None:
                        streams += target.decoupled
                        target.step.stream = streams if target.decoupled else before
                    target.stream = target.step.stream
                target.visited = True
                unvisited.append(target)
        return streams > 0


def _tensor_of(ensemble: str, tensor: ModelInput | ModelOutput, *, batching: bool) -> _TypedTensor:
    """Return an input or output of the ensemble itself."""
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    return _TypedTensor(ensemble, tensor.data_type, dims, batching=batching)


def _match(dims: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two shapes can be equal; -1 stands for any size."""
    return len(dims) == len(others) and all(
        -1 in (one, other) or one == other for one, other in zip(dims, others, strict=True)
    )


def _text(dims: Sequence[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"
