"""Rules for a whole configuration. The texts were compared with those of a Triton 2.51.0 server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kernel.config.check import check_complete, check_config
from kernel.config.generated.model_config_pb2 import ModelConfig
from kernel.config.gpus import NO_GPUS, UsableGpus
from kernel.errors import BadConfig, InternalError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

    Prepare = Callable[..., ModelConfig]

PYTHON = 'backend: "python"\nmax_batch_size: 4\n'


@pytest.mark.parametrize(
    "more",
    [
        "",
        "dynamic_batching {}",
        "dynamic_batching { preferred_batch_size: [1, 4] }",
        "dynamic_batching { priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 1 } }",
        # Without levels, settings of levels have no effect.
        "dynamic_batching { default_priority_level: 3 priority_queue_policy { key: 4 value {} } }",
        # Without a timeout, its action has no effect.
        "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY } }",
        'platform: "anything"',
        "response_cache { enable: true }",
        "model_transaction_policy { decoupled: true }",
        'model_metrics { metric_control {metric_identifier { family: "f" } histogram_options { buckets: 1}}}',
        'default_model_filename: "../shared.py"',
        "sequence_batching {}",
    ],
)
def test_a_valid_configuration_passes(more: str, tensors: str, prepared: Prepare) -> None:
    config = prepared(PYTHON + tensors + more)
    check_config(config, "m")
    check_complete(config, gpus=NO_GPUS)


def test_checking_does_not_change_the_configuration(tensors: str, prepared: Prepare) -> None:
    config = prepared(PYTHON + tensors)
    before = config.SerializeToString(deterministic=True)
    check_config(config, "m")
    check_complete(config, gpus=NO_GPUS)
    assert config.SerializeToString(deterministic=True) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('platform: "foo"', "unexpected platform type 'foo' for m"),
        ('default_model_filename: "foo.onnx"', "unexpected platform type '' for m"),
        (
            'platform: "ensemble" backend: "python"',
            "Ensemble model 'm' must have platform type 'ensemble' and empty backend type",
        ),
        (
            'platform: "tensorrt_plan" backend: "onnxruntime"',
            "unexpected 'platform' and 'backend' pair, got:tensorrt_plan, onnxruntime",
        ),
        (
            'platform: "weird" backend: "tensorrt"',
            "unexpected 'platform' and 'backend' pair, got:weird, tensorrt",
        ),
        ('backend: "python" max_batch_size: -1', "'max_batch_size' must be non-negative value for m"),
        (
            'backend: "python" dynamic_batching { preferred_batch_size: 1 }',
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            PYTHON + "dynamic_batching { preferred_batch_size: [2, 0] }",
            "dynamic batching preferred size must be positive for m",
        ),
        (
            PYTHON + "dynamic_batching { preferred_batch_size: [2, 5] }",
            "dynamic batching preferred size must be <= max batch size for m",
        ),
        (
            PYTHON + "dynamic_batching { priority_levels: 3 }",
            "default priority level must be in range [1, 3] for m",
        ),
        (
            PYTHON + "dynamic_batching { priority_levels: 3 default_priority_level: 4 }",
            "default priority level must be in range [1, 3] for m",
        ),
        (
            PYTHON + "dynamic_batching { priority_levels: 3 default_priority_level: 1 "
            "priority_queue_policy { key: 4 value {} } }",
            "priority queue policy must have priority level in range [1, 3] for m",
        ),
        (
            PYTHON + "dynamic_batching { preserve_ordering: true priority_levels: 3 default_priority_level: 1 }",
            "Only one priority level is allowed when 'preserve_ordering' is true for m",
        ),
        (
            PYTHON + "dynamic_batching { preserve_ordering: true "
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            PYTHON + "dynamic_batching { preserve_ordering: true priority_levels: 1 default_priority_level: 1 "
            "priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 1}}}",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m",
        ),
        (
            PYTHON + "ensemble_scheduling {}",
            "ensemble scheduling cannot be set for model 'm' whose platform is not ensemble",
        ),
        (
            'platform: "ensemble"',
            "ensemble scheduling must be set for ensemble m whose platform is ensemble",
        ),
        (
            PYTHON + "model_transaction_policy { decoupled: true } response_cache { enable: true }",
            (
                "Response Cache does not currently support model m with 'decoupled' transaction policy. "
                "Please disable the response cache."
            ),
        ),
        (
            PYTHON + "model_metrics { metric_control [{ histogram_options { buckets: 1 } }] }",
            "metric control must specify 'metric_identifier'",
        ),
        (
            PYTHON + "model_metrics { metric_control [{ metric_identifier {} histogram_options { buckets: 1 } }] }",
            "metric identifier must specify non-empty 'family'",
        ),
        (
            PYTHON + 'model_metrics { metric_control [{ metric_identifier { family: "f" } }] }',
            "metric control must specify 'histogram_options'",
        ),
        (
            PYTHON + 'model_metrics { metric_control [{ metric_identifier { family: "f" } histogram_options {} }] }',
            "histogram options must specify non-empty 'buckets'",
        ),
        (
            PYTHON + 'name: "other"',
            "unexpected directory name 'm' for model 'other', directory name must equal model name",
        ),
    ],
)
def test_a_broken_rule_has_triton_s_text(text: str, message: str, tensors: str, prepared: Prepare) -> None:
    with pytest.raises(BadConfig) as caught:
        check_config(prepared(text + tensors), "m")
    assert caught.value.message == message


def test_a_model_must_have_a_name() -> None:
    with pytest.raises(BadConfig, match=r"^model configuration must specify 'name'$"):
        check_config(ModelConfig(backend="python"), "m")


@pytest.mark.parametrize(
    "more",
    [
        'default_model_filename: "../../other/model.py"',
        'default_model_filename: "/etc/passwd"',
        'default_model_filename: "a/../../../b"',
        'default_model_filename: "a\\000b"',
        'cc_model_filenames { key: "8.0" value: "../../x" }',
        'model_warmup [{ name: "w" inputs { key: "A" value { input_data_file: "../../secret" } } }]',
        'sequence_batching { state [{ initial_state [{ data_file: "/secret" }] }] }',
    ],
)
def test_a_file_outside_the_model_folder_is_refused(more: str, tensors: str, prepared: Prepare) -> None:
    with pytest.raises(Unsupported, match=r"in model 'm' is outside model directory$"):
        check_config(prepared(PYTHON + tensors + more), "m")


@pytest.mark.parametrize(
    ("group", "gpu_count", "message"),
    [
        ("kind: KIND_MODEL gpus: 0", 1, "has kind KIND_MODEL but specifies one or more GPUs"),
        ("kind: KIND_CPU gpus: 0", 1, "has kind KIND_CPU but specifies one or more GPUs"),
        ("kind: KIND_AUTO gpus: 0", 0, "has kind KIND_CPU but specifies one or more GPUs"),
        ("kind: KIND_GPU", 0, "has kind KIND_GPU but no GPUs are available"),
        (
            "kind: KIND_GPU gpus: 0",
            0,
            (
                "specifies invalid or unsupported gpu id 0. GPUs with at least the minimum required CUDA "
                "compute compatibility of 6.000000 are: "
            ),
        ),
        (
            "kind: KIND_GPU gpus: [1, 2]",
            2,
            (
                "specifies invalid or unsupported gpu id 2. GPUs with at least the minimum required CUDA "
                "compute compatibility of 6.000000 are: 0, 1"
            ),
        ),
        (
            'kind: KIND_CPU profile: "1"',
            0,
            "and platform specifies profile field which is only supported for TensorRT models",
        ),
    ],
)
def test_a_group_with_unavailable_devices_is_refused(
    group: str, gpu_count: int, message: str, tensors: str, prepared: Prepare
) -> None:
    config = prepared(PYTHON + tensors + f"instance_group [{{ {group} }}]", gpus=UsableGpus.first(gpu_count))
    with pytest.raises(BadConfig) as caught:
        check_complete(config, UsableGpus.first(gpu_count))
    assert caught.value.message == f"instance group m_0 of model m {message}"


@pytest.mark.parametrize("group", ["kind: KIND_GPU", "kind: KIND_GPU gpus: 1", "kind: KIND_AUTO gpus: [0, 1]"])
def test_a_group_may_use_available_devices(group: str, tensors: str, prepared: Prepare) -> None:
    check_complete(
        prepared(PYTHON + tensors + f"instance_group [{{ {group} }}]", gpus=UsableGpus.first(2)), UsableGpus.first(2)
    )


def test_a_model_with_only_passive_instances_is_refused(tensors: str, prepared: Prepare) -> None:
    groups = ["{ passive: true }", "{ count: 2 passive: true }"]
    config = prepared(f"{PYTHON}{tensors}instance_group [{', '.join(groups)}]")
    with pytest.raises(BadConfig, match=r"^model 'm' has only passive instances, which no request reaches$"):
        check_complete(config, UsableGpus.first(0))
    check_complete(prepared(f"{PYTHON}{tensors}instance_group [{groups[0]}, {{ count: 1 }}]"), UsableGpus.first(0))


def test_a_group_that_was_not_normalised_is_refused() -> None:
    config = ModelConfig(name="m", backend="python", instance_group=[{"name": "g", "kind": "KIND_GPU"}])
    with pytest.raises(BadConfig, match=r"^instance group g of model m has kind KIND_GPU but specifies no GPUs$"):
        check_complete(config, gpus=UsableGpus.first(1))
    config.instance_group[0].kind = 0  # type: ignore[assignment]
    with pytest.raises(InternalError, match=r"has unexpected kind KIND_AUTO$"):
        check_complete(config, gpus=UsableGpus.first(1))
    config.instance_group[0].kind = 9  # type: ignore[assignment]
    with pytest.raises(InternalError, match=r"has unexpected kind KIND_AUTO$"):
        check_complete(config, gpus=UsableGpus.first(1))
    del config.instance_group[:]
    with pytest.raises(BadConfig, match=r"^must specify one or more 'instance group's for m$"):
        check_complete(config, gpus=UsableGpus.first(1))


@pytest.mark.parametrize("profile", ["x", "-1", ""])
def test_a_tensorrt_profile_is_a_number(profile: str, tensors: str, prepared: Prepare) -> None:
    text = 'backend: "tensorrt"' + tensors + "instance_group [{ profile: "
    check_complete(prepared(text + '"12" }]'), NO_GPUS)
    with pytest.raises(BadConfig, match="specifies invalid profile"):
        check_complete(prepared(text + f'"{profile}" }}]'), NO_GPUS)
