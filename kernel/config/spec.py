"""`ModelSpec`: the part of a model's configuration that requests need.

It is built once at load, from a configuration that was filled in, normalised and checked. Requests then
never read protobuf messages. Durations are in nanoseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.ensemble_spec import (
    EnsembleSpec,  # msgspec reads annotations: specs go to helpers
    ensemble_spec,
)
from kernel.config.fair_queuing import FairQueuing  # noqa: TC001 - msgspec reads annotations: specs go to helpers
from kernel.config.generated.model_config_pb2 import DataType, ModelQueuePolicy
from kernel.config.model_parameters import FIXED, ModelParameters, model_parameters
from kernel.config.sequence_spec import SequenceBatching, sequence_batching
from shm.datatypes import BY_CONFIG_NAME

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import (
        ModelConfig,
        ModelInput,
        ModelOutput,
    )


class TensorSpec(msgspec.Struct, frozen=True):
    """An input or output of a model. In shapes, -1 means any size."""

    name: str
    #: As in the protocols: `FP32`, `BYTES`.
    datatype: str
    #: As configured, without the batch dimension.
    dims: tuple[int, ...]
    #: As clients see it: `dims`, preceded by -1 for the batch dimension if the model batches.
    shape: tuple[int, ...]
    #: The shape that the model uses instead of `dims`; None if it uses `dims`.
    reshape: tuple[int, ...] | None = None
    #: Inputs only: requests may omit the input.
    optional: bool = False
    #: Inputs only: the requests of a batch may have different shapes.
    allow_ragged_batch: bool = False
    is_shape_tensor: bool = False
    #: Outputs only: the file with the class labels, relative to the model's folder; may be empty.
    label_filename: str = ""
    #: Outputs of ensembles only: the class labels. The workers of other models read their labels themselves.
    labels: tuple[str, ...] = ()


class QueuePolicy(msgspec.Struct, frozen=True):
    """Limits of a queue: how long a request may wait in it, and how many requests it holds; 0 means no limit."""

    #: After its timeout a request moves behind all other requests, instead of failing.
    delay_on_timeout: bool = False
    default_timeout_ns: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


class DynamicBatching(msgspec.Struct, frozen=True):
    """How the dynamic batcher joins requests in batches. Sizes are in rows."""

    #: Ascending.
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    #: Whether a batch may start before the delay has passed, when no more requests are expected.
    delay_may_end_early: bool = True
    preserve_ordering: bool = False
    #: 0 if the model has no priorities; otherwise levels count from 1, the most urgent.
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    #: Priority level → policy. Other levels have the default policy.
    queue_policies: dict[int, QueuePolicy] = {}

    def queue_policy(self, priority_level: int) -> QueuePolicy:
        return self.queue_policies.get(priority_level, self.default_queue_policy)

    @property
    def limits_waiting(self) -> bool:
        """Whether the model has priorities, queue limits or timeouts, which apply only while a request is queued.

        They would not apply to a request that was dispatched ahead of time.
        """
        policies = (self.default_queue_policy, *self.queue_policies.values())
        return self.priority_levels > 0 or any(
            policy.max_queue_size or policy.default_timeout_ns or policy.allow_timeout_override for policy in policies
        )


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as front doors, kernel and schedulers see it. Tensors are in the order of the configuration."""

    name: str
    platform: str
    backend: str
    #: In rows; 0 if the model does not batch.
    max_batch_size: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    #: A request may have any number of responses.
    decoupled: bool = False
    #: None if the model executes each request alone.
    dynamic_batching: DynamicBatching | None = None
    #: None if the model has no sequences.
    sequence_batching: SequenceBatching | None = None
    #: The steps of an ensemble; None if the model executes itself.
    ensemble: EnsembleSpec | None = None
    response_cache: bool = False
    #: Additional labels of the model's metrics.
    metric_tags: dict[str, str] = {}
    #: The model's repository if --model-namespacing allows one name in several repositories; else empty.
    namespace: str = ""
    #: How long an execution may take: 0 for no limit, None for the server's limit.
    execution_timeout_ns: int | None = None
    #: The name of an installed scheduler; empty if the configuration decides which of ours the model has.
    scheduler: str = ""
    #: The name of an installed batching rule; empty if the model has none.
    batching_rule: str = ""
    #: None if the model serves all requests of a priority level in their order.
    fair: FairQueuing | None = None
    #: Whether a request that ends a worker is found and refused, and others of its batch are executed again.
    isolates_poison: bool = False
    #: Name → `string_value` of `parameters`, for schedulers and batching rules of packages.
    parameters: dict[str, str] = {}

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """The names of the inputs that every request must have."""
        return tuple(name for name, tensor in self.inputs.items() if not tensor.optional)


def model_spec(config: ModelConfig, namespace: str = "") -> ModelSpec:
    """Return the spec of a checked configuration. If several tensors have the same name, the last one counts."""
    batched = config.max_batch_size >= 1
    ours = model_parameters(config)
    return ModelSpec(
        name=config.name,
        platform=config.platform,
        backend=config.backend,
        max_batch_size=config.max_batch_size,
        inputs={tensor.name: _input(tensor, batched) for tensor in config.input},
        outputs={tensor.name: _output(tensor, batched) for tensor in config.output},
        decoupled=config.model_transaction_policy.decoupled,
        dynamic_batching=_dynamic_batching(config, ours) if config.HasField("dynamic_batching") else None,
        sequence_batching=sequence_batching(config),
        ensemble=ensemble_spec(config, namespace),
        response_cache=config.response_cache.enable,
        metric_tags=dict(config.metric_tags),
        namespace=namespace,
        execution_timeout_ns=ours.execution_timeout_ns,
        scheduler=ours.scheduler,
        batching_rule=ours.batching,
        fair=ours.fair,
        isolates_poison=ours.isolates_poison,
        parameters={name: value.string_value for name, value in sorted(config.parameters.items())},
    )


def _input(tensor: ModelInput, batched: bool) -> TensorSpec:
    dims = tuple(tensor.dims)
    return TensorSpec(
        name=tensor.name,
        datatype=_datatype(tensor.data_type),
        dims=dims,
        shape=(-1, *dims) if batched else dims,
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        optional=tensor.optional,
        allow_ragged_batch=tensor.allow_ragged_batch,
        is_shape_tensor=tensor.is_shape_tensor,
    )


def _output(tensor: ModelOutput, batched: bool) -> TensorSpec:
    dims = tuple(tensor.dims)
    return TensorSpec(
        name=tensor.name,
        datatype=_datatype(tensor.data_type),
        dims=dims,
        shape=(-1, *dims) if batched else dims,
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        is_shape_tensor=tensor.is_shape_tensor,
        label_filename=tensor.label_filename,
    )


def _datatype(data_type: DataType) -> str:
    return BY_CONFIG_NAME[DataType.Name(data_type)].name


def _dynamic_batching(config: ModelConfig, ours: ModelParameters) -> DynamicBatching:
    batching = config.dynamic_batching
    levels = batching.priority_levels
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted(set(batching.preferred_batch_size))),
        max_queue_delay_ns=batching.max_queue_delay_microseconds * 1000,
        delay_may_end_early=ours.queue_delay != FIXED,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=levels,
        # Without levels, the default level and the policies of levels have no effect (Triton).
        default_priority_level=batching.default_priority_level if levels else 0,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        queue_policies={
            level: _queue_policy(batching.priority_queue_policy[level])
            for level in sorted(batching.priority_queue_policy if levels else ())
        },
    )


def _queue_policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        delay_on_timeout=policy.timeout_action == ModelQueuePolicy.DELAY,
        default_timeout_ns=policy.default_timeout_microseconds * 1000,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )
