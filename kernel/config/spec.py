"""`ModelSpec`: what requests need of a configuration, read once at load.

Built from a configuration that was filled in, normalised and checked, so that no request touches
protobuf. Durations are in nanoseconds here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.generated.model_config_pb2 import DataType, ModelQueuePolicy
from shm.datatypes import BY_CONFIG_NAME

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import (
        ModelConfig,
        ModelDynamicBatching,
        ModelInput,
        ModelOutput,
    )


class TensorSpec(msgspec.Struct, frozen=True):
    """An input or output of a model. In all shapes -1 stands for any size."""

    name: str
    #: As on the wire: `FP32`, `BYTES`.
    datatype: str
    #: As configured: without the batch dimension where the model batches.
    dims: tuple[int, ...]
    #: As clients see it: `dims`, behind the batch dimension -1 where the model batches.
    shape: tuple[int, ...]
    #: The shape that the model itself uses in the place of `dims`, if it differs.
    reshape: tuple[int, ...] | None = None
    #: Inputs: requests may leave it out; shapes may differ within a batch.
    optional: bool = False
    allow_ragged_batch: bool = False
    is_shape_tensor: bool = False
    #: Outputs: the file with the names of classes, relative to the model's folder; may be empty.
    label_filename: str = ""


class QueuePolicy(msgspec.Struct, frozen=True):
    """How long a request may wait in its queue and how many may; 0 means without limit."""

    #: What comes after the time-out: behind all others instead of an error.
    delay_on_timeout: bool = False
    default_timeout_ns: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


class DynamicBatching(msgspec.Struct, frozen=True):
    """How requests are joined in batches; sizes are rows."""

    #: Ascending.
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_ns: int = 0
    preserve_ordering: bool = False
    #: 0 where all requests are equal; otherwise levels count from 1, the most urgent.
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    #: By priority level; others have the default policy.
    queue_policies: dict[int, QueuePolicy] = {}

    def queue_policy(self, priority_level: int) -> QueuePolicy:
        """Return the policy of a priority level."""
        return self.queue_policies.get(priority_level, self.default_queue_policy)


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as front doors, kernel and schedulers see it. Tensors are in the configuration's order."""

    name: str
    platform: str
    backend: str
    #: 0 where the model does not batch.
    max_batch_size: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    #: A request may have any number of responses.
    decoupled: bool = False
    #: None where each request is executed by itself.
    dynamic_batching: DynamicBatching | None = None
    sequence_batching: bool = False
    ensemble: bool = False
    response_cache: bool = False
    #: Additional labels of the model's metrics.
    metric_tags: dict[str, str] = {}
    #: The repository, where the same name may stand in several (--model-namespacing); else empty.
    namespace: str = ""

    @property
    def required_inputs(self) -> tuple[str, ...]:
        """Names of the inputs that every request must have."""
        return tuple(name for name, tensor in self.inputs.items() if not tensor.optional)


def model_spec(config: ModelConfig, namespace: str = "") -> ModelSpec:
    """Return the spec of a checked configuration. Of tensors with one name the last counts."""
    batched = config.max_batch_size >= 1
    return ModelSpec(
        name=config.name,
        platform=config.platform,
        backend=config.backend,
        max_batch_size=config.max_batch_size,
        inputs={tensor.name: _input(tensor, batched) for tensor in config.input},
        outputs={tensor.name: _output(tensor, batched) for tensor in config.output},
        decoupled=config.model_transaction_policy.decoupled,
        dynamic_batching=(_dynamic_batching(config.dynamic_batching) if config.HasField("dynamic_batching") else None),
        sequence_batching=config.HasField("sequence_batching"),
        ensemble=config.HasField("ensemble_scheduling"),
        response_cache=config.response_cache.enable,
        metric_tags=dict(config.metric_tags),
        namespace=namespace,
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


def _dynamic_batching(batching: ModelDynamicBatching) -> DynamicBatching:
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted(set(batching.preferred_batch_size))),
        max_queue_delay_ns=batching.max_queue_delay_microseconds * 1000,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        queue_policies={
            level: _queue_policy(batching.priority_queue_policy[level])
            for level in sorted(batching.priority_queue_policy)
        },
    )


def _queue_policy(policy: ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        delay_on_timeout=policy.timeout_action == ModelQueuePolicy.DELAY,
        default_timeout_ns=policy.default_timeout_microseconds * 1000,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )
