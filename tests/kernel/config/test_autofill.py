from __future__ import annotations

import pytest

from kernel.config.autofill import fill_backend, normalise
from kernel.config.generated.model_config_pb2 import ModelConfig, ModelInstanceGroup
from kernel.config.gpus import NO_GPUS, UsableGpus
from kernel.errors import BadConfig
from kernel.repository.source import choose_versions


def filled(files: dict[str, bool] | None, **fields: str) -> tuple[str, str, str]:
    config = ModelConfig(**fields)  # type: ignore[arg-type]
    fill_backend(config, "m", files)
    return config.backend, config.platform, config.default_model_filename


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"model.savedmodel": True}, ("tensorflow", "tensorflow_savedmodel", "model.savedmodel")),
        ({"model.graphdef": False}, ("tensorflow", "tensorflow_graphdef", "model.graphdef")),
        ({"model.plan": False}, ("tensorrt", "tensorrt_plan", "model.plan")),
        ({"model.onnx": False}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"model.onnx": True}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"model.xml": False, "model.bin": False}, ("openvino", "", "model.xml")),
        ({"model.pt": False}, ("pytorch", "pytorch_libtorch", "model.pt")),
        ({"model.pt2": False}, ("pytorch", "torch_aoti", "model.pt2")),
        ({"model.py": False, "more.py": False}, ("python", "", "model.py")),
        ({"model.py": False, "model.onnx": False}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"MLmodel": False, "model.pkl": False, "model.skops": False}, ("mlflow", "", "")),
        ({"MLmodel": False, "model.onnx": False}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"MLmodel": False, "model.py": False}, ("mlflow", "", "")),
    ],
)
def test_the_files_of_a_version_determine_the_backend(files: dict[str, bool], found: tuple[str, str, str]) -> None:
    assert filled(files) == found


def test_a_folder_with_the_name_of_a_model_file_is_not_a_model() -> None:
    with pytest.raises(BadConfig, match="Could not determine backend"):
        filled({"model.plan": True, "model.savedmodel": False})


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"backend": "onnxruntime"}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"platform": "onnxruntime_onnx"}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        ({"default_model_filename": "model.onnx"}, ("onnxruntime", "onnxruntime_onnx", "model.onnx")),
        (
            {"backend": "onnxruntime", "default_model_filename": "net.onnx"},
            ("onnxruntime", "onnxruntime_onnx", "net.onnx"),
        ),
        ({"backend": "python"}, ("python", "", "model.py")),
        ({"backend": "python", "platform": "mine"}, ("python", "mine", "model.py")),
        ({"backend": "pytorch"}, ("pytorch", "pytorch_libtorch", "model.pt")),
        ({"backend": "pytorch", "platform": "torch_aoti"}, ("pytorch", "torch_aoti", "model.pt2")),
        ({"backend": "custom"}, ("custom", "", "")),
        ({"platform": "ensemble"}, ("", "ensemble", "")),
        ({"platform": "unknown"}, ("", "unknown", "")),
        ({"default_model_filename": "net.onnx"}, ("", "", "net.onnx")),
    ],
)
def test_configured_fields_take_precedence_over_files(fields: dict[str, str], found: tuple[str, str, str]) -> None:
    assert filled({"model.plan": False}, **fields) == found
    assert filled(None, **fields) == found


def test_files_decide_between_the_formats_of_one_backend() -> None:
    assert filled({"model.pt2": False}, backend="pytorch") == ("pytorch", "torch_aoti", "model.pt2")


@pytest.mark.parametrize("files", [None, {}, {"weights.bin": False}])
def test_without_files_the_model_name_determines_the_backend(files: dict[str, bool] | None) -> None:
    config = ModelConfig()
    fill_backend(config, "net.tiny.v2", files)
    assert (config.name, config.backend, config.default_model_filename) == (
        "net.tiny.v2",
        "tiny.v2",
        "model.tiny.v2",
    )
    with pytest.raises(BadConfig) as caught:
        fill_backend(ModelConfig(), "net", files)
    assert caught.value.message == (
        "Invalid model name: Could not determine backend for model 'net' with no backend in model "
        "configuration. Expected model name of the form 'model.<backend_name>'."
    )


def test_a_configured_name_is_not_overwritten() -> None:
    config = ModelConfig(name="other", backend="python")
    fill_backend(config, "m", None)
    assert config.name == "other"


def test_defaults_of_a_model_without_batching() -> None:
    config = ModelConfig(name="m", backend="python")
    normalise(config, gpus=NO_GPUS)
    assert config == ModelConfig(
        name="m",
        backend="python",
        version_policy={"latest": {"num_versions": 1}},
        optimization={"input_pinned_memory": {"enable": True}, "output_pinned_memory": {"enable": True}},
        instance_group=[{"name": "m", "kind": ModelInstanceGroup.KIND_CPU, "count": 1}],
    )


def test_a_version_policy_that_says_nothing_stays_and_serves_all_versions() -> None:
    config = ModelConfig(name="m", backend="python", version_policy={})
    normalise(config, gpus=NO_GPUS)
    assert config.HasField("version_policy")
    assert config.version_policy.WhichOneof("policy_choice") is None
    assert choose_versions(config, [1, 2, 5]) == [1, 2, 5]


def test_normalising_again_changes_nothing() -> None:
    config = ModelConfig(name="m", backend="onnxruntime", max_batch_size=8)
    config.dynamic_batching.SetInParent()
    config.instance_group.add(kind=ModelInstanceGroup.KIND_AUTO)
    normalise(config, gpus=UsableGpus.first(2))
    once = ModelConfig()
    once.CopyFrom(config)
    normalise(config, gpus=UsableGpus.first(2))
    assert config == once


def test_the_preferred_batch_size_defaults_to_the_largest() -> None:
    config = ModelConfig(name="m", max_batch_size=8)
    config.dynamic_batching.SetInParent()
    normalise(config, gpus=NO_GPUS)
    assert list(config.dynamic_batching.preferred_batch_size) == [8]

    without = ModelConfig(name="m")
    without.dynamic_batching.SetInParent()
    normalise(without, gpus=NO_GPUS)
    assert list(without.dynamic_batching.preferred_batch_size) == []


def test_no_batcher_is_added_by_default() -> None:
    config = ModelConfig(name="m", max_batch_size=8)
    normalise(config, gpus=NO_GPUS)
    assert config.WhichOneof("scheduling_choice") is None


def test_sequences_end_after_one_idle_second_by_default() -> None:
    config = ModelConfig(name="m", max_batch_size=4)
    config.sequence_batching.oldest.SetInParent()
    normalise(config, gpus=NO_GPUS)
    assert config.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert list(config.sequence_batching.oldest.preferred_batch_size) == [4]


def test_an_ensemble_gets_neither_instances_nor_memory_settings() -> None:
    config = ModelConfig(name="e", platform="ensemble")
    config.ensemble_scheduling.SetInParent()
    normalise(config, gpus=UsableGpus.first(1))
    assert not config.instance_group
    assert not config.HasField("optimization")


@pytest.mark.parametrize(
    ("kind", "gpus", "gpu_count", "found"),
    [
        ("KIND_AUTO", [], 0, ("KIND_CPU", [])),
        ("KIND_AUTO", [], 2, ("KIND_GPU", [0, 1])),
        ("KIND_AUTO", [1], 2, ("KIND_GPU", [1])),
        ("KIND_AUTO", [2], 2, ("KIND_CPU", [2])),
        ("KIND_GPU", [], 2, ("KIND_GPU", [0, 1])),
        ("KIND_GPU", [], 0, ("KIND_GPU", [])),
        ("KIND_GPU", [0], 2, ("KIND_GPU", [0])),
        ("KIND_CPU", [], 2, ("KIND_CPU", [])),
        ("KIND_MODEL", [], 2, ("KIND_MODEL", [])),
    ],
)
def test_kind_and_devices_depend_on_the_gpu_count(
    kind: str, gpus: list[int], gpu_count: int, found: tuple[str, list[int]]
) -> None:
    config = ModelConfig(name="m", backend="python")
    config.instance_group.add(kind=kind, gpus=gpus)
    normalise(config, UsableGpus.first(gpu_count))
    group = config.instance_group[0]
    assert (ModelInstanceGroup.Kind.Name(group.kind), list(group.gpus)) == found


@pytest.mark.parametrize(
    ("backend", "kind", "given", "count"),
    [
        ("onnxruntime", "KIND_CPU", 0, 2),
        ("onnxruntime", "KIND_AUTO", 0, 2),
        ("onnxruntime", "KIND_CPU", 1, 1),
        ("onnxruntime", "KIND_MODEL", 0, 1),
        ("python", "KIND_CPU", 0, 1),
        ("python", "KIND_CPU", -1, 1),
        ("python", "KIND_CPU", 3, 3),
    ],
)
def test_the_default_instance_count_depends_on_the_backend(backend: str, kind: str, given: int, count: int) -> None:
    config = ModelConfig(name="m", backend=backend)
    config.instance_group.add(kind=kind, count=given)
    normalise(config, gpus=NO_GPUS)
    assert config.instance_group[0].count == count


def test_groups_without_a_name_are_named_by_their_index() -> None:
    config = ModelConfig(name="m", backend="python")
    config.instance_group.add()
    config.instance_group.add(name="mine")
    config.instance_group.add()
    normalise(config, gpus=NO_GPUS)
    assert [group.name for group in config.instance_group] == ["m_0", "mine", "m_2"]
