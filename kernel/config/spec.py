"""`ModelSpec`: the part of a model's configuration that requests need. `SequenceBatching` and `EnsembleSpec` are in it.

It is built once at load, from a configuration that was filled in, normalised and checked. Requests then
never read protobuf messages. Durations are in nanoseconds. Control tensors and implicit state of sequences are the
worker's (`backends/worker/sequence_batches.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.fair_queuing import FairQueuing  # noqa: TC001 - msgspec reads annotations: specs go to helpers
from kernel.config.generated.model_config_pb2 import (
    TYPE_INT32,
    TYPE_STRING,
    TYPE_UINT32,
    DataType,
    ModelQueuePolicy,
    ModelSequenceBatching,
)
from kernel.config.model_parameters import FIXED, ModelParameters, model_parameters
from shm.datatypes import BY_CONFIG_NAME

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import (
        ModelConfig,
        ModelInput,
        ModelOutput,
    )

#: `model_version` of a step that uses the newest version.
_NEWEST = -1


class EnsembleStep(msgspec.Struct, frozen=True):
    """A model that the ensemble executes once all its input tensors are there."""

    model_name: str
    #: The version as a request names it; empty for the newest that is ready.
    model_version: str
    #: Input of the step's model → tensor of the ensemble.
    inputs: dict[str, str]
    #: Output of the step's model → tensor of the ensemble.
    outputs: dict[str, str]
    #: The repository in which the model is looked for first, with --model-namespacing; else empty.
    namespace: str = ""


class EnsembleSpec(msgspec.Struct, frozen=True):
    """The steps of an ensemble. A tensor is written by one step or is an input of the ensemble."""

    steps: tuple[EnsembleStep, ...] = ()
    #: The most requests that one step executes at the same time, of all requests to the ensemble; 0 for no limit.
    max_inflight_requests: int = 0
    #: The version of the ensemble itself, for its responses. Set when it is loaded.
    version_text: str = "1"

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the models of the steps, each once, in the order of the steps."""
        return tuple(dict.fromkeys(step.model_name for step in self.steps))


def ensemble_spec(config: ModelConfig, namespace: str = "") -> EnsembleSpec | None:
    """Return the steps of a checked configuration; None if the model is not an ensemble.

    `namespace` is the repository of the ensemble if repositories are namespaces.
    """
    if not config.HasField("ensemble_scheduling"):
        return None
    scheduling = config.ensemble_scheduling
    return EnsembleSpec(
        tuple(
            EnsembleStep(
                step.model_name,
                "" if step.model_version == _NEWEST else str(step.model_version),
                dict(sorted(step.input_map.items())),
                dict(sorted(step.output_map.items())),
                namespace,
            )
            for step in scheduling.step
        ),
        scheduling.max_inflight_requests,
    )


#: The longest time: 36 years, so that a time in the future fits a timer of the system.
_LONGEST_NS = 1 << 60


class SequenceBatching(msgspec.Struct, frozen=True):
    """How sequences share the instances of a model."""

    #: The strategy `oldest`: a sequence has at most one request in a batch, at any row. Otherwise `direct`: a sequence
    #: has the row of its slot in each batch.
    oldest: bool = False
    #: How many sequences one instance has at a time.
    slot_count: int = 1
    #: A sequence ends after this time without a request.
    max_idle_ns: int = 1_000_000_000
    #: How long a request may wait for a larger batch.
    max_queue_delay_ns: int = 0
    #: `direct`: the share of slots that must have a request before a batch runs without the delay; 0 for no wait.
    minimum_slot_utilization: float = 0.0
    #: `oldest`: in requests, ascending.
    preferred_batch_sizes: tuple[int, ...] = ()
    #: The model may reschedule a request, and a request without a correlation id is a sequence of its own.
    iterative: bool = False
    #: Whether the worker keeps implicit state.
    has_state: bool = False
    #: Whether the model gets the correlation id as a text, and else how many of its bits.
    correlation_id_is_text: bool = False
    correlation_id_bits: int = 64


def sequence_batching(config: ModelConfig) -> SequenceBatching | None:
    """Return the sequence batching of a checked configuration, or None if it has none."""
    if not config.HasField("sequence_batching"):
        return None
    batching = config.sequence_batching
    oldest = batching.HasField("oldest")
    slots = max(1, config.max_batch_size)
    if oldest and batching.oldest.max_candidate_sequences > 0:
        slots = batching.oldest.max_candidate_sequences
    strategy = batching.oldest if oldest else batching.direct
    types = _correlation_id_types(batching)
    return SequenceBatching(
        oldest=oldest,
        slot_count=slots,
        max_idle_ns=min(batching.max_sequence_idle_microseconds * 1000, _LONGEST_NS),
        max_queue_delay_ns=min(strategy.max_queue_delay_microseconds * 1000, _LONGEST_NS),
        minimum_slot_utilization=batching.direct.minimum_slot_utilization,
        preferred_batch_sizes=tuple(sorted(set(batching.oldest.preferred_batch_size))),
        iterative=batching.iterative_sequence,
        has_state=bool(batching.state),
        correlation_id_is_text=TYPE_STRING in types,
        correlation_id_bits=32 if TYPE_INT32 in types or TYPE_UINT32 in types else 64,
    )


def _correlation_id_types(batching: ModelSequenceBatching) -> set[int]:
    """Return the datatypes of the control tensor with the correlation id, of which there is at most one."""
    controls = [control for control_input in batching.control_input for control in control_input.control]
    kind = ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID
    return {control.data_type for control in controls if control.kind == kind}


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

    #: The name by which clients know the model.
    name: str
    platform: str
    backend: str
    #: In rows; 0 if the model does not batch.
    max_batch_size: int
    #: Name → datatype and shape.
    inputs: dict[str, TensorSpec]
    #: Name → datatype and shape.
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
    #: Whether a request may be executed again after the host of its worker was lost.
    retries_on_worker_loss: bool = True
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
        retries_on_worker_loss=ours.retries_on_worker_loss,
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
