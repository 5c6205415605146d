"""Converts parameters of the accelerator `tensorrt` to options of ONNX Runtime's TensorRT provider. Pure.

Names, rules and texts are those of Triton's ONNX Runtime backend (onnxruntime.cc).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kernel.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PRECISIONS = {"FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable", "FP32": ""}

#: Triton's older names → those of ONNX Runtime.
_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}

_INTEGERS = frozenset({
    "trt_auxiliary_streams", "trt_builder_optimization_level", "trt_dla_core", "trt_ep_context_embed_mode",
    "trt_max_partition_iterations", "trt_max_workspace_size", "trt_min_subgraph_size",
})  # fmt: skip

_BOOLEANS = frozenset({
    "trt_build_heuristics_enable", "trt_context_memory_sharing_enable", "trt_cuda_graph_enable",
    "trt_detailed_build_log", "trt_dla_enable", "trt_dump_ep_context_model", "trt_dump_subgraphs",
    "trt_engine_cache_enable", "trt_force_sequential_engine_build", "trt_force_timing_cache",
    "trt_int8_use_native_calibration_table", "trt_layer_norm_fp32_fallback", "trt_sparsity_enable",
    "trt_timing_cache_enable",
})  # fmt: skip

_TEXTS = frozenset({
    "trt_engine_cache_prefix", "trt_int8_calibration_table_name", "trt_profile_max_shapes", "trt_profile_min_shapes",
    "trt_profile_opt_shapes", "trt_tactic_sources",
})  # fmt: skip

#: Files that are read, written or executed.
_PATHS = frozenset({
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
            if value not in _PRECISIONS:
                raise InvalidArgument(f"unsupported precision mode '{value}' is requested")
            if _PRECISIONS[value]:
                options[_PRECISIONS[value]] = "True"
            continue
        name = _RENAMED.get(key, key)
        if name in _RENAMED.values() and name == key:
            name = ""  # Triton has only the older name
        options[name] = _converted(key, name, value, version_dir)
    return options


def _converted(key: str, name: str, value: str, version_dir: Path) -> str:
    if name in _INTEGERS:
        return str(integer(value))
    if name in _BOOLEANS:
        return str(boolean(value))
    if name in _TEXTS:
        return value
    if name in _PATHS:
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


def integer(value: str) -> int:
    """Return a number. Raises `InvalidArgument` with Triton's text."""
    try:
        return int(value)
    except ValueError:
        raise InvalidArgument(f"failed to convert '{value}' to integral number") from None


def boolean(value: str) -> bool:
    """Return a truth value. Raises `InvalidArgument` with Triton's text."""
    if value.lower() not in ("true", "on", "1", "false", "off", "0"):
        raise InvalidArgument(f"failed to convert '{value}' to boolean")
    return value.lower() in ("true", "on", "1")
