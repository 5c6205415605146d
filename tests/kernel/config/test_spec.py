"""The steps of an ensemble as the scheduler sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.spec import (
    DynamicBatching,
    EnsembleSpec,
    EnsembleStep,
    ModelSpec,
    QueuePolicy,
    TensorSpec,
    ensemble_spec,
    model_spec,
)

if TYPE_CHECKING:
    from collections.abc import Callable

if TYPE_CHECKING:
    Prepare = Callable[..., ModelConfig]


def test_a_model_without_batching(prepared: Prepare) -> None:
    config = prepared("""
        input [{ name: "A" data_type: TYPE_STRING dims: [-1, 2] optional: true }]
        output [{ name: "Y" data_type: TYPE_BF16 dims: [3] label_filename: "labels.txt" }]
    """)
    assert model_spec(config) == ModelSpec(
        name="m",
        platform="",
        backend="python",
        max_batch_size=0,
        inputs={"A": TensorSpec("A", "BYTES", (-1, 2), (-1, 2), optional=True)},
        outputs={"Y": TensorSpec("Y", "BF16", (3,), (3,), label_filename="labels.txt")},
    )


def test_the_batch_dimension_is_in_the_shape_but_not_in_the_dims(prepared: Prepare) -> None:
    spec = model_spec(
        prepared("""
            max_batch_size: 1
            input { name: "A" data_type: TYPE_FP32 dims: 6 reshape { shape: [2, 3] } allow_ragged_batch: 1 }
            output [{ name: "Y" data_type: TYPE_FP32 dims: [1] reshape { shape: [] } }]
        """)
    )
    assert spec.inputs["A"] == TensorSpec("A", "FP32", (6,), (-1, 6), (2, 3), allow_ragged_batch=True)
    assert spec.outputs["Y"] == TensorSpec("Y", "FP32", (1,), (-1, 1), ())


def test_durations_are_nanoseconds(prepared: Prepare) -> None:
    spec = model_spec(
        prepared("""
            max_batch_size: 8
            dynamic_batching {
                preferred_batch_size: [8, 2, 8]
                max_queue_delay_microseconds: 500
                priority_levels: 3
                default_priority_level: 2
                default_queue_policy { default_timeout_microseconds: 7 allow_timeout_override: true }
                priority_queue_policy { key: 1 value { timeout_action: DELAY max_queue_size: 9 } }
            }
        """)
    )
    default = QueuePolicy(default_timeout_ns=7000, allow_timeout_override=True)
    urgent = QueuePolicy(delay_on_timeout=True, max_queue_size=9)
    assert spec.dynamic_batching == DynamicBatching(
        preferred_batch_sizes=(2, 8),
        max_queue_delay_ns=500_000,
        priority_levels=3,
        default_priority_level=2,
        default_queue_policy=default,
        queue_policies={1: urgent},
    )
    assert spec.dynamic_batching.queue_policy(1) is spec.dynamic_batching.queue_policies[1]
    assert spec.dynamic_batching.queue_policy(2) == default


def test_a_spec_names_the_kind_of_scheduling(prepared: Prepare) -> None:
    assert model_spec(prepared("")).dynamic_batching is None
    assert model_spec(prepared("sequence_batching {}")).sequence_batching
    assert model_spec(prepared('platform: "ensemble" ensemble_scheduling {}')).ensemble
    assert model_spec(prepared("model_transaction_policy { decoupled: true }")).decoupled
    assert model_spec(prepared("response_cache { enable: true }")).response_cache


def test_optional_inputs_are_not_required(prepared: Prepare) -> None:
    spec = model_spec(
        prepared("""
            input { name: "B" data_type: TYPE_FP32 dims: 1 }
            input { name: "O" data_type: TYPE_FP32 dims: 1 optional: true }
            input { name: "A" data_type: TYPE_FP32 dims: 1 }
        """)
    )
    assert list(spec.inputs) == ["B", "O", "A"]
    assert spec.required_inputs == ("B", "A")


def test_a_model_without_steps_has_no_ensemble_spec() -> None:
    assert ensemble_spec(ModelConfig(name="m")) is None


def test_versions_and_maps_are_as_requests_need_them() -> None:
    config = ModelConfig(name="e", platform="ensemble")
    config.ensemble_scheduling.max_inflight_requests = 3
    for version in (-1, 0, 7):
        step = config.ensemble_scheduling.step.add(model_name=f"m{version % 2}", model_version=version)
        step.input_map["IN"] = "A"
        step.output_map["OUT"] = "Z"
    found = ensemble_spec(config)
    assert found == EnsembleSpec(
        tuple(
            EnsembleStep(name, version, {"IN": "A"}, {"OUT": "Z"})
            for name, version in (("m1", ""), ("m0", "0"), ("m1", "7"))
        ),
        3,
    )
    assert found.models == ("m1", "m0")
