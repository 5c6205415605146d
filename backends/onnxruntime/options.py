"""Converts a model's configuration to ONNX Runtime's session options and run options.

Triton's ONNX Runtime backend has the same names of parameters. The default number of threads of an instance is
ONNX Runtime's: one per physical core. If the worker may use only some CPUs, it is the number of these.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime as ort

from kernel.errors import InvalidArgument
from kernel.machine import limited_processor_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from backends.base import ModelArguments

#: ONNX Runtime logs only fatal errors. It also raises all other errors, and the backend reports them.
_LOG_FATAL = 4

#: Triton's `optimization.graph.level` → ONNX Runtime's level. Any other number enables all optimizations.
_GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}

SHRINKAGE = "memory.enable_memory_arena_shrinkage"
GRAPH_NUMBER = "gpu_graph_id"
DOES_NOT_WAIT = "disable_synchronize_execution_providers"


def session_options(arguments: ModelArguments) -> ort.SessionOptions:
    """Return the options of the model's session. Raises `InvalidArgument` for wrong values."""
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_FATAL
    graph_level = int(arguments.config.get("optimization", {}).get("graph", {}).get("level", 0))
    options.graph_optimization_level = _GRAPH_LEVELS.get(graph_level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    options.execution_mode = _execution_mode(arguments)
    threads = max(0, arguments.integer_parameter("intra_op_thread_count"))
    options.intra_op_num_threads = threads or limited_processor_count()
    options.inter_op_num_threads = max(0, arguments.integer_parameter("inter_op_thread_count"))
    options.enable_cpu_mem_arena = arguments.boolean_parameter("enable_mem_arena", options.enable_cpu_mem_arena)
    options.enable_mem_pattern = arguments.boolean_parameter("enable_mem_pattern", options.enable_mem_pattern)
    for key, value in _session_entries(arguments):
        options.add_session_config_entry(key, value)
    for library in custom_op_libraries(arguments):
        options.register_custom_ops_library(str(library))
    return options


def graph_run_options(arguments: ModelArguments, number: int) -> ort.RunOptions:
    """Return the options of a run with the CUDA graph of this number, from 1 on; with -1 none is captured or used.

    For sessions that capture graphs, on a stream as in `run_options`.
    """
    options = run_options(arguments, on_stream=True, graph_number=number)
    assert options is not None, "a run on a stream has options"
    return options


def run_options(arguments: ModelArguments, *, on_stream: bool = False, graph_number: int = -1) -> ort.RunOptions | None:
    """Return the options of each run, or None if there are none.

    `on_stream`: a run only enqueues work on the session's stream, and does not wait for it.
    """
    entries = {}
    shrinkage = arguments.parameter(SHRINKAGE)
    if shrinkage is not None:
        entries[SHRINKAGE] = shrinkage
    if on_stream:
        entries[DOES_NOT_WAIT] = "1"
    if not entries:
        return None
    # Also where no graph is captured: without it, each bound run of ONNX Runtime 1.32 with options throws and catches
    # an exception, which takes 30 µs.
    entries[GRAPH_NUMBER] = str(graph_number)
    options = ort.RunOptions()
    options.log_severity_level = _LOG_FATAL
    for key, value in entries.items():
        options.add_run_config_entry(key, value)
    return options


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


def model_path(arguments: ModelArguments, capability: tuple[int, int] | None = None) -> Path:
    """Return the path of the model file: `default_model_filename`, or `model.onnx` inside it if it is a folder.

    For a GPU with a compute `capability`, `cc_model_filenames` may name another. Raises `InvalidArgument` if the path
    is outside the model's folder.
    """
    path = _inside(arguments, arguments.model_file("model.onnx", capability), "model file")
    return path / "model.onnx" if path.is_dir() else path


def _inside(arguments: ModelArguments, path: Path, what: str) -> Path:
    # Only the name is checked: the owner of the repository may link to files outside.
    normal = Path(os.path.normpath(path))
    if not normal.is_relative_to(os.path.normpath(arguments.model_dir)):
        raise InvalidArgument(f"{what} '{path}' is outside the folder of model '{arguments.model_name}'")
    return normal
