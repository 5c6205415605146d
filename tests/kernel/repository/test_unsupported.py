"""Settings that only make things faster are ignored, and the log says which."""

from __future__ import annotations

import pytest

from kernel.config.autofill import normalise
from kernel.config.gpus import NO_GPUS, UsableGpus
from kernel.config.load import from_pbtxt
from kernel.repository.unsupported import ignored_settings


def ignored(text: str, *, backend: str = "python", gpus: UsableGpus = NO_GPUS) -> list[str]:
    config = from_pbtxt(f'name: "m" backend: "{backend}" {text}'.encode(), "config.pbtxt")
    normalise(config, gpus)
    return ignored_settings(config, cache=True, limiter=True)


@pytest.mark.parametrize(
    ("settings", "phrase"),
    [
        ("cuda { graphs: true busy_wait_events: true }",
         "optimization.cuda { graphs busy_wait_events } (only for TensorRT models, and ONNX models on a GPU)"),
        ("cuda { graph_spec { batch_size: 1 } }",
         "optimization.cuda { graph_spec } (only for TensorRT models, and ONNX models on a GPU)"),
        ("priority: PRIORITY_MAX", "optimization.priority PRIORITY_MAX (only for TensorRT models)"),
        ("priority: 9", "optimization.priority 9 (only for TensorRT models)"),
        ("gather_kernel_buffer_threshold: 3",
         "optimization.gather_kernel_buffer_threshold (only for tensors on a GPU)"),
        ("eager_batching: true", "optimization.eager_batching (a batch is gathered when its instance is idle)"),
        ("graph { level: 1 }", "optimization.graph (the backend 'python' has none)"),
        ('execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } }',
         "optimization.execution_accelerators.gpu_execution_accelerator 'tensorrt' (no instance runs on a GPU)"),
        ('execution_accelerators { cpu_execution_accelerator { name: "openvino" } }',
         "optimization.execution_accelerators.cpu_execution_accelerator 'openvino' (the backend 'python' has none)"),
    ],
)  # fmt: skip
def test_an_optimization_without_effect_is_named(settings: str, phrase: str) -> None:
    assert ignored(f"optimization {{ {settings} }}") == [phrase]


def test_tensorrt_models_have_graphs_and_priorities() -> None:
    text = "optimization { priority: PRIORITY_MAX cuda { graphs: true graph_spec { batch_size: 1 } } }"
    files = 'cc_model_filenames { key: "9.0" value: "h.plan" }'
    assert ignored(f"{text} {files}", backend="tensorrt") == []
    assert ignored("optimization { cuda { graphs: true busy_wait_events: true } }", backend="tensorrt") == [
        "optimization.cuda { busy_wait_events } (a batch is waited for once, without a busy processor)"
    ]
    assert ignored(files) == ["cc_model_filenames (only for models of TensorRT, and of ONNX and PyTorch on a GPU)"]


def test_onnx_models_have_graphs_on_a_gpu() -> None:
    text = "optimization { cuda { graphs: true output_copy_stream: true } } instance_group { kind: %s }"
    assert ignored(text % "KIND_GPU", backend="onnxruntime", gpus=UsableGpus.first(1)) == [
        "optimization.cuda { output_copy_stream } (a batch is waited for once, without a busy processor)"
    ]
    (line,) = ignored(text % "KIND_CPU", backend="onnxruntime", gpus=UsableGpus.first(1))
    assert line.startswith("optimization.cuda { graphs output_copy_stream } (only for TensorRT models, and ONNX")


def test_libraries_of_operators_are_only_for_onnx_models() -> None:
    text = 'model_operations { op_library_filename: "ops.so" }'
    assert ignored(text) == ["model_operations (the backend 'python' has none)"]
    assert ignored(text, backend="onnxruntime") == []


def test_what_has_an_effect_is_not_named() -> None:
    assert ignored("") == []
    onnx = (
        'optimization { graph { level: 1 } execution_accelerators { cpu_execution_accelerator { name: "openvino" } } '
        "input_pinned_memory { enable: true } }"
    )
    assert ignored(onnx, backend="onnxruntime") == []
    cuda = 'optimization { execution_accelerators { gpu_execution_accelerator { name: "cuda" } } }'
    assert ignored(f"{cuda} instance_group {{ kind: KIND_GPU }}", backend="onnxruntime", gpus=UsableGpus.first(1)) == []
    assert (
        len(ignored(f"{cuda} instance_group {{ kind: KIND_CPU }}", backend="onnxruntime", gpus=UsableGpus.first(1)))
        == 1
    )
    assert len(ignored(f"{cuda} instance_group {{ kind: KIND_GPU }}", gpus=UsableGpus.first(1))) == 1


def test_accelerators_for_gpus_say_that_there_is_no_instance_on_a_gpu() -> None:
    text = 'optimization { execution_accelerators { gpu_execution_accelerator [{ name: "cuda" }, { name: "x" }] } }'
    assert ignored(text, backend="onnxruntime") == [
        "optimization.execution_accelerators.gpu_execution_accelerator 'cuda', 'x' (no instance runs on a GPU)"
    ]
