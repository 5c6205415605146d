"""What the scheduler gets of a configuration with sequence batching."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.spec import SequenceBatching, sequence_batching

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.config.generated.model_config_pb2 import ModelConfig

    Prepare = Callable[..., ModelConfig]


def spec(prepared: Prepare, text: str) -> SequenceBatching | None:
    return sequence_batching(prepared(f'backend: "python" max_batch_size: 4 {text}'))


def test_a_model_may_have_none(prepared: Prepare) -> None:
    assert spec(prepared, "dynamic_batching {}") is None


def test_direct_is_the_default_and_has_a_slot_for_each_row(prepared: Prepare) -> None:
    assert spec(prepared, "sequence_batching {}") == SequenceBatching(slot_count=4)
    assert sequence_batching(prepared('backend: "python" sequence_batching {}')) == SequenceBatching(slot_count=1)


def test_settings_of_direct(prepared: Prepare) -> None:
    found = spec(
        prepared,
        "sequence_batching { max_sequence_idle_microseconds: 5 iterative_sequence: true"
        " direct { max_queue_delay_microseconds: 7 minimum_slot_utilization: 0.5 }"
        ' control_input [{ name: "ID" control [{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING }] }]'
        ' state [{ input_name: "A" output_name: "B" data_type: TYPE_FP32 dims: [1] }] }',
    )
    assert found == SequenceBatching(
        slot_count=4,
        max_idle_ns=5_000,
        max_queue_delay_ns=7_000,
        minimum_slot_utilization=0.5,
        iterative=True,
        has_state=True,
        correlation_id_is_text=True,
    )


def test_settings_of_oldest(prepared: Prepare) -> None:
    found = spec(
        prepared,
        "sequence_batching { oldest { max_candidate_sequences: 9 preferred_batch_size: [4, 2]"
        " max_queue_delay_microseconds: 1 } }",
    )
    assert found == SequenceBatching(oldest=True, slot_count=9, preferred_batch_sizes=(2, 4), max_queue_delay_ns=1_000)
    default = spec(prepared, "sequence_batching { oldest { } }")
    assert default is not None
    assert (default.slot_count, default.preferred_batch_sizes) == (4, (4,))


def test_times_fit_a_timer_of_the_system(prepared: Prepare) -> None:
    found = spec(prepared, f"sequence_batching {{ max_sequence_idle_microseconds: {2**64 - 1} }}")
    assert found is not None
    assert found.max_idle_ns == 1 << 60
