"""Converts a model's configuration to ONNX Runtime's session options, execution providers and run options.

The names of parameters are those of Triton's ONNX Runtime backend. The default number of threads of an instance is
ONNX Runtime's: one per physical core. If the worker may use only some CPUs, it is the number of these.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from kernel.errors import InvalidArgument, Unsupported
from kernel.machine import processor_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import Config, ModelArguments

    Provider = tuple[str, dict[str, str]]

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
OPENVINO_PROVIDER = "OpenVINOExecutionProvider"

#: ONNX Runtime logs only fatal errors. It also raises all other errors, and the backend reports them.
_LOG_FATAL = 4

#: Triton's `optimization.graph.level` → ONNX Runtime's level. Any other number enables all optimizations.
_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}

#: Parameters of Triton's ONNX Runtime backend for instances on GPUs.
_CUDA_PARAMETERS = (
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "do_copy_in_default_stream",
    "enable_cuda_graph",
    "gpu_mem_limit",
)

_SHRINKAGE = "memory.enable_memory_arena_shrinkage"


def session_options(arguments: ModelArguments) -> ort.SessionOptions:
    """Return the options of the model's session. Raises `InvalidArgument` for wrong values."""
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_FATAL
    graph_level = int(_optimization(arguments.config).get("graph", {}).get("level", 0))
    options.graph_optimization_level = _GRAPH_LEVELS.get(graph_level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    options.execution_mode = _execution_mode(arguments)
    options.intra_op_num_threads = max(0, arguments.integer_parameter("intra_op_thread_count")) or _allowed_cpus()
    options.inter_op_num_threads = max(0, arguments.integer_parameter("inter_op_thread_count"))
    options.enable_cpu_mem_arena = arguments.boolean_parameter("enable_mem_arena", options.enable_cpu_mem_arena)
    options.enable_mem_pattern = arguments.boolean_parameter("enable_mem_pattern", options.enable_mem_pattern)
    for key, value in _session_entries(arguments):
        options.add_session_config_entry(key, value)
    for library in custom_op_libraries(arguments):
        options.register_custom_ops_library(str(library))
    return options


def run_options(arguments: ModelArguments) -> ort.RunOptions | None:
    """Return the options of each run, or None if the configuration has none: this saves 27 µs per bound run."""
    shrinkage = arguments.parameter(_SHRINKAGE)
    if shrinkage is None:
        return None
    options = ort.RunOptions()
    options.log_severity_level = _LOG_FATAL
    options.add_run_config_entry(_SHRINKAGE, shrinkage)
    return options


def _allowed_cpus() -> int:
    """Return the number of CPUs that a host policy or a container allows, or 0 if the worker may use all CPUs.

    By default, ONNX Runtime starts a thread for each core of the machine, and binds the thread to the core.
    """
    allowed = processor_count()
    return allowed if allowed < (os.cpu_count() or 1) else 0


def _execution_mode(arguments: ModelArguments) -> ort.ExecutionMode:
    mode = arguments.integer_parameter("execution_mode")
    if mode not in (0, 1):
        raise InvalidArgument(
            f"Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got {mode} ."
        )
    return ort.ExecutionMode.ORT_PARALLEL if mode else ort.ExecutionMode.ORT_SEQUENTIAL


def _session_entries(arguments: ModelArguments) -> Iterator[tuple[str, str]]:
    """Yield ONNX Runtime's own `session.*` options.

    Raises `InvalidArgument` for an option that names a file, because the file could be outside the repository.
    """
    for key in sorted(arguments.config.get("parameters", {})):
        if not key.startswith("session."):
            continue
        if "path" in key or "file" in key:
            raise InvalidArgument(f"parameter '{key}' of model '{arguments.model_name}' is not allowed")
        yield key, arguments.parameter(key) or ""


def custom_op_libraries(arguments: ModelArguments) -> list[Path]:
    """Return the libraries of custom operators. Names in the configuration are relative to the version's folder.

    Raises `InvalidArgument` for a library outside the model's folder: loading a library executes its code.
    """
    names: Sequence[str] = arguments.config.get("model_operations", {}).get("op_library_filename", [])
    return [_inside(arguments, arguments.version_dir / name, "custom operator library") for name in names]


def model_path(arguments: ModelArguments) -> Path:
    """Return the path of the model file: `default_model_filename`, or `model.onnx` inside it if it is a folder.

    Raises `InvalidArgument` if the path is outside the model's folder.
    """
    path = _inside(arguments, arguments.model_file("model.onnx"), "model file")
    return path / "model.onnx" if path.is_dir() else path


def _inside(arguments: ModelArguments, path: Path, what: str) -> Path:
    # Only the name is checked: the owner of the repository may link to files outside.
    normal = Path(os.path.normpath(path))
    if not normal.is_relative_to(os.path.normpath(arguments.model_dir)):
        raise InvalidArgument(f"{what} '{path}' is outside the folder of model '{arguments.model_name}'")
    return normal


# ---- execution providers --------------------------------------------------------------------


def providers(arguments: ModelArguments, available: Sequence[str]) -> list[Provider]:
    """Return the execution providers of the instance in order of preference; the CPU's is always last.

    `available` are the providers of the installed onnxruntime. Raises `Unsupported` if it lacks the GPU's, and
    `InvalidArgument` for an unknown accelerator. One for the CPU that it lacks is left out (`ignored_settings`).
    """
    accelerators = _optimization(arguments.config).get("execution_accelerators", {})
    chosen: list[Provider] = []
    if arguments.kind == "GPU":
        chosen.append(_cuda(arguments, accelerators.get("gpu_execution_accelerator", []), available))
    for accelerator in accelerators.get("cpu_execution_accelerator", []):
        if accelerator["name"] != "openvino":
            raise _unknown_accelerator(accelerator)
        if OPENVINO_PROVIDER in available:
            chosen.append((OPENVINO_PROVIDER, {"device_type": "CPU"}))
    return [*chosen, (CPU_PROVIDER, {})]


def ignored_settings(arguments: ModelArguments, available: Sequence[str]) -> list[str]:
    """Return a log line for each setting that only makes the model faster, and has no effect here.

    `available` are the providers of the installed onnxruntime.
    """
    model, lines = arguments.model_name, list[str]()
    accelerators = _optimization(arguments.config).get("execution_accelerators", {})
    if OPENVINO_PROVIDER not in available and accelerators.get("cpu_execution_accelerator"):
        lines.append(
            f"the 'openvino' accelerator of model '{model}' has no effect: the installed onnxruntime has no "
            f"{OPENVINO_PROVIDER}. The model runs without it"
        )
    for name in _CUDA_PARAMETERS:
        if arguments.parameter(name) is not None:
            why = "it is one of the accelerator 'cuda'" if arguments.kind == "GPU" else "the instance runs on the CPU"
            lines.append(f"parameter '{name}' of model '{model}' has no effect: {why}")
    if arguments.parameter("share_session_between_instances") is not None:
        lines.append(
            f"parameter 'share_session_between_instances' of model '{model}' has no effect: every instance has its own "
            "process"
        )
    return lines


def _cuda(arguments: ModelArguments, accelerators: Sequence[dict[str, Any]], available: Sequence[str]) -> Provider:
    _require(CUDA_PROVIDER, available, f"instance '{arguments.instance_name}' of kind KIND_GPU")
    settings: dict[str, str] = {}
    for accelerator in accelerators:
        if accelerator["name"] == "tensorrt":
            raise Unsupported(
                "the 'tensorrt' accelerator is not supported for ONNX models; without it they run with CUDA"
            )
        if accelerator["name"] != "cuda":
            raise _unknown_accelerator(accelerator)
        settings.update(accelerator.get("parameters", {}))
    return CUDA_PROVIDER, {**settings, "device_id": str(arguments.device_id)}


def _require(provider: str, available: Sequence[str], reason: str) -> None:
    if provider not in available:
        raise Unsupported(
            f"{reason} needs an onnxruntime with the {provider}, but the installed one has only {', '.join(available)}"
        )


def _unknown_accelerator(accelerator: dict[str, Any]) -> InvalidArgument:
    return InvalidArgument(f"unknown Execution Accelerator '{accelerator['name']}' is requested")


# ---- values ---------------------------------------------------------------------------------


def _optimization(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = config.get("optimization", {})
    return found
