"""`SequenceBatching`: the part of a configuration's `sequence_batching` that the scheduler needs. Times in nanoseconds.

Control tensors and implicit state are the worker's (`backends/worker/sequences/sequence_batches.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.config.generated.model_config_pb2 import TYPE_INT32, TYPE_STRING, TYPE_UINT32, ModelSequenceBatching

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig


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
