"""Converts a model's configuration to ONNX Runtime's execution providers and their options. Pure.

Names, rules and texts are those of Triton's ONNX Runtime backend (onnxruntime.cc). The accelerator `cuda` passes its
parameters on as they are; older configurations have four of them under `parameters`, which take precedence.

Converts parameters of the accelerator `tensorrt` to options of ONNX Runtime's TensorRT provider. Pure.

Names, rules and texts are those of Triton's ONNX Runtime backend (onnxruntime.cc).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from backends.base import as_boolean, as_integer
from backends.worker.devices.graph_specs import graph_specs
from kernel.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from backends.base import ModelArguments
    from backends.worker.devices.graph_specs import GraphSpec

    Provider = tuple[str, dict[str, str]]

TENSORRT_PRECISIONS = {"FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable", "FP32": ""}

#: Triton's older names → ONNX Runtime's names.
_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}

TENSORRT_INTEGERS = frozenset({
    "trt_auxiliary_streams", "trt_builder_optimization_level", "trt_dla_core", "trt_ep_context_embed_mode",
    "trt_max_partition_iterations", "trt_max_workspace_size", "trt_min_subgraph_size",
})  # fmt: skip

TENSORRT_BOOLEANS = frozenset({
    "trt_build_heuristics_enable", "trt_context_memory_sharing_enable", "trt_cuda_graph_enable",
    "trt_detailed_build_log", "trt_dla_enable", "trt_dump_ep_context_model", "trt_dump_subgraphs",
    "trt_engine_cache_enable", "trt_force_sequential_engine_build", "trt_force_timing_cache",
    "trt_int8_use_native_calibration_table", "trt_layer_norm_fp32_fallback", "trt_sparsity_enable",
    "trt_timing_cache_enable",
})  # fmt: skip

TENSORRT_TEXTS = frozenset({
    "trt_engine_cache_prefix", "trt_int8_calibration_table_name", "trt_profile_max_shapes", "trt_profile_min_shapes",
    "trt_profile_opt_shapes", "trt_tactic_sources",
})  # fmt: skip

#: Files that are read, written or executed.
TENSORRT_PATHS = frozenset({
    "trt_engine_cache_path", "trt_ep_context_file_path", "trt_extra_plugin_lib_paths", "trt_timing_cache_path",
})  # fmt: skip


def tensorrt_options(parameters: Mapping[str, str], version_dir: Path) -> dict[str, str]:
    """Return the provider's options, without the device. Truth values are `True` and `False`.

    Raises `InvalidArgument` for an unknown parameter, a wrong value, and a path that leads out of the model's folder;
    relative paths begin in the version's folder.
    """
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in TENSORRT_PRECISIONS:
                raise InvalidArgument(f"unsupported precision mode '{value}' is requested")
            if TENSORRT_PRECISIONS[value]:
                options[TENSORRT_PRECISIONS[value]] = "True"
            continue
        name = _RENAMED.get(key, key)
        if name in _RENAMED.values() and name == key:
            name = ""  # Triton has only the older name
        options[name] = _converted(key, name, value, version_dir)
    return options


def _converted(key: str, name: str, value: str, version_dir: Path) -> str:
    if name in TENSORRT_INTEGERS:
        return str(as_integer(value))
    if name in TENSORRT_BOOLEANS:
        return str(as_boolean(value))
    if name in TENSORRT_TEXTS:
        return value
    if name in TENSORRT_PATHS:
        return ";".join(_path(key, part, version_dir) for part in value.split(";") if part)
    raise InvalidArgument(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")


def _path(key: str, value: str, version_dir: Path) -> str:
    path = os.path.normpath(version_dir / value)
    # A configuration may come from a client: nothing outside the repository is read, written or executed.
    if not path.startswith(os.path.normpath(version_dir.parent) + os.sep):
        raise InvalidArgument(
            f"parameter '{key}' of the accelerator 'tensorrt' is outside the model's folder: '{value}'"
        )
    return path


CPU_PROVIDER = "CPUExecutionProvider"

CUDA_PROVIDER = "CUDAExecutionProvider"

OPENVINO_PROVIDER = "OpenVINOExecutionProvider"

TENSORRT_PROVIDER = "TensorrtExecutionProvider"

#: Parameters with numbers for names: parameter → names by number.
CUDA_NUMBERED = {
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
}

#: The parameters of older configurations, outside the accelerator `cuda`.
CUDA_PARAMETERS = (*CUDA_NUMBERED, "do_copy_in_default_stream", "gpu_mem_limit")

#: Truth values among the accelerator's parameters.
CUDA_BOOLEANS = ("do_copy_in_default_stream", "use_ep_level_unified_stream")

CUDA_GRAPH = "enable_cuda_graph"

#: TensorRT's provider repeats its first run with the addresses of that run's tensors, whatever is bound later.
_TENSORRT_GRAPH = "trt_cuda_graph_enable"


def providers(
    arguments: ModelArguments, available: Sequence[str], stream: int = 0, *, graphs: bool = False
) -> list[Provider]:
    """Return the execution providers of the instance in order of preference; the CPU's is always last.

    `available` are the providers of the installed onnxruntime, `stream` is the address of the stream that providers on
    a GPU run on, 0 for one of their own. With `graphs` the session captures CUDA graphs. Raises `Unsupported` if it
    lacks the GPU's, and `InvalidArgument` for an unknown accelerator or a wrong value. An accelerator that it lacks is
    left out (`ignored_settings`).
    """
    accelerators = _accelerators(arguments)
    chosen: list[Provider] = []
    if arguments.kind == "GPU":
        chosen += _on_gpu(arguments, accelerators.get("gpu_execution_accelerator", []), available, stream)
        if graphs:
            chosen[-1][1][CUDA_GRAPH] = "1"
    for accelerator in accelerators.get("cpu_execution_accelerator", []):
        if accelerator["name"] != "openvino":
            raise _unknown(accelerator)
        if OPENVINO_PROVIDER in available:
            chosen.append((OPENVINO_PROVIDER, {"device_type": "CPU"}))
    return [*chosen, (CPU_PROVIDER, {})]


def ignored_settings(arguments: ModelArguments, active: Sequence[str]) -> list[str]:
    """Return a log line for each setting that only makes the model faster, and has no effect here.

    `active` are the providers that the model's session has.
    """
    model, lines = arguments.model_name, list[str]()
    accelerators = _accelerators(arguments)
    on_gpu = accelerators.get("gpu_execution_accelerator", []) if arguments.kind == "GPU" else []
    for provider, name, found in (
        (OPENVINO_PROVIDER, "openvino", accelerators.get("cpu_execution_accelerator", [])),
        (TENSORRT_PROVIDER, "tensorrt", [each for each in on_gpu if each["name"] == "tensorrt"]),
    ):
        if found and provider not in active:
            lines.append(
                f"the '{name}' accelerator of model '{model}' has no effect: the installed onnxruntime has no "
                f"{provider}, or cannot load the libraries that this needs. The model runs without it"
            )
    if any(as_boolean(each.get("parameters", {}).get(_TENSORRT_GRAPH) or "0") for each in on_gpu):
        lines.append(
            f"parameter '{_TENSORRT_GRAPH}' of the 'tensorrt' accelerator of model '{model}' has no effect: batches "
            f"would compute with the tensors of the first one. '{CUDA_GRAPH}' of the 'cuda' accelerator makes graphs"
        )
    for name in CUDA_PARAMETERS:
        if arguments.parameter(name) is not None and arguments.kind != "GPU":
            lines.append(f"parameter '{name}' of model '{model}' has no effect: the instance runs on the CPU")
    if arguments.parameter("share_session_between_instances") is not None:
        lines.append(
            f"parameter 'share_session_between_instances' of model '{model}' has no effect: every instance has its own "
            "session"
        )
    return lines


def wanted_graphs(arguments: ModelArguments) -> tuple[list[GraphSpec], bool]:
    """Return the CUDA graphs to capture, none if the model asks for none, and whether a session must capture them.

    They are asked for by `enable_cuda_graph` of the accelerator `cuda`, where ONNX Runtime refuses a model that cannot
    have them, or by `optimization.cuda.graphs`, which in Triton has no effect on ONNX models. `optimization.cuda` says
    the shapes, with the rules of Triton's TensorRT backend. Raises `InvalidArgument`.
    """
    on_gpu = _accelerators(arguments).get("gpu_execution_accelerator", [])
    required = any(
        as_boolean(each.get("parameters", {}).get(CUDA_GRAPH) or "0") for each in on_gpu if each["name"] == "cuda"
    )
    config = arguments.config
    if required:
        optimization = config.get("optimization", {})
        cuda = {**optimization.get("cuda", {}), "graphs": True}
        config = {**config, "optimization": {**optimization, "cuda": cuda}}
    return graph_specs(config), required


def graph_obstacle(config: Mapping[str, Any]) -> str:
    """Return why a model can have no CUDA graphs; empty if its configuration does not say so."""
    tensors = [*config.get("input", []), *config.get("output", [])]
    strings = [tensor["name"] for tensor in tensors if tensor.get("data_type") == "TYPE_STRING"]
    if strings:
        return f"tensor '{strings[0]}' has strings, which are on the host"
    if config.get("sequence_batching", {}).get("state"):
        return "its implicit state is kept on the host"
    return ""


def _on_gpu(
    arguments: ModelArguments, accelerators: Sequence[Mapping[str, Any]], available: Sequence[str], stream: int
) -> list[Provider]:
    """Return TensorRT's providers, in the configuration's order, and CUDA's, which is always there."""
    _require(CUDA_PROVIDER, available, f"instance '{arguments.instance_name}' of kind KIND_GPU")
    device = {"device_id": str(arguments.device_id)}
    if stream:
        device |= {"has_user_compute_stream": "1", "user_compute_stream": str(stream)}
    chosen: list[Provider] = []
    cuda: dict[str, str] = {}
    for accelerator in accelerators:
        parameters = accelerator.get("parameters", {})
        if accelerator["name"] == "tensorrt":
            options = tensorrt_options(parameters, arguments.version_dir)
            options.pop(_TENSORRT_GRAPH, None)
            if TENSORRT_PROVIDER in available:
                chosen.append((TENSORRT_PROVIDER, {**options, **device}))
        elif accelerator["name"] == "cuda":
            cuda.update(_cuda_options(parameters))
        else:
            raise _unknown(accelerator)
    return [*chosen, (CUDA_PROVIDER, {**cuda, **_cuda_parameters(arguments), **device})]


def _cuda_options(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of the accelerator `cuda` as options. Empty values are left out, as in Triton."""
    options = {}
    for key, value in parameters.items():
        if key in CUDA_BOOLEANS:
            options[key] = str(int(as_boolean(value)))
        elif value and key != CUDA_GRAPH:
            options[key] = value
    return options


def _cuda_parameters(arguments: ModelArguments) -> dict[str, str]:
    """Return the options that the model has under `parameters`. Raises `InvalidArgument`."""
    options = {}
    for key, names in CUDA_NUMBERED.items():
        value = arguments.parameter(key)
        if value is not None:
            number = as_integer(value)
            if not 0 <= number < len(names):
                raise InvalidArgument(f"unsupported {key} value '{number}' is requested")
            options[key] = names[number]
    for key in ("gpu_mem_limit", "do_copy_in_default_stream"):
        value = arguments.parameter(key)
        if value is not None:
            options[key] = str(as_integer(value)) if key == "gpu_mem_limit" else str(int(as_boolean(value)))
    return options


def _accelerators(arguments: ModelArguments) -> Mapping[str, Any]:
    found: Mapping[str, Any] = arguments.config.get("optimization", {}).get("execution_accelerators", {})
    return found


def _require(provider: str, available: Sequence[str], reason: str) -> None:
    if provider not in available:
        raise Unsupported(
            f"{reason} needs an onnxruntime with the {provider}, but the installed one has only {', '.join(available)}"
        )


def _unknown(accelerator: Mapping[str, Any]) -> InvalidArgument:
    return InvalidArgument(f"unknown Execution Accelerator '{accelerator['name']}' is requested")
