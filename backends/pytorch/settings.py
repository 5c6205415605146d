"""Converts parameters of a configuration to settings of PyTorch. Pure.

Names, defaults and texts are those of Triton's pytorch backend (model_state.cc).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kernel.errors import Unsupported

if TYPE_CHECKING:
    from backends.base import ModelArguments


class TorchSettings(msgspec.Struct, frozen=True):
    """How a model is executed. None leaves PyTorch's own default."""

    #: Optimized execution of TorchScript: the first calls take longer.
    optimized_execution: bool = True
    #: Inference mode. Without it, only gradients are off.
    inference_mode: bool = True
    cudnn: bool = True
    #: Free the cached memory of the GPU after each execution.
    cache_cleaning: bool = False
    jit_profiling: bool | None = None
    jit_executor: bool | None = None
    tensor_fuser: bool | None = None
    #: Threads of one operation, and between operations; 0 for PyTorch's number.
    intra_op_threads: int = 0
    inter_op_threads: int = 0


def torch_settings(arguments: ModelArguments, allowed_cpus: int = 0) -> TorchSettings:
    """Return the settings of a model. Raises `InvalidArgument` for a wrong value.

    `allowed_cpus` is the default of the threads of an operation: see `limited_processor_count`.
    """
    if arguments.parameter("MODEL_INIT_LIBRARY") is not None:
        raise Unsupported(
            f"parameter 'MODEL_INIT_LIBRARY' of model '{arguments.model_name}' is not supported: this server does not "
            "call functions of shared libraries before it loads a model"
        )
    cleaning = arguments.boolean_parameter("CACHE_CLEANING_ENABLED", False)  # its name for PT2 files in Triton
    return TorchSettings(
        optimized_execution=not arguments.boolean_parameter("DISABLE_OPTIMIZED_EXECUTION", False),
        inference_mode=arguments.boolean_parameter("INFERENCE_MODE", True),
        cudnn=not arguments.boolean_parameter("DISABLE_CUDNN", False),
        cache_cleaning=arguments.boolean_parameter("ENABLE_CACHE_CLEANING", cleaning),
        jit_profiling=_optional_flag(arguments, "ENABLE_JIT_PROFILING"),
        jit_executor=_optional_flag(arguments, "ENABLE_JIT_EXECUTOR"),
        tensor_fuser=_optional_flag(arguments, "ENABLE_TENSOR_FUSER"),
        intra_op_threads=max(0, arguments.integer_parameter("INTRA_OP_THREAD_COUNT")) or allowed_cpus,
        inter_op_threads=max(0, arguments.integer_parameter("INTER_OP_THREAD_COUNT")),
    )


def ignored_parameters(arguments: ModelArguments) -> list[str]:
    """Return a log line for each parameter that only makes the model faster or smaller, and has no effect here.

    Raises `InvalidArgument` for one of them with a wrong value.
    """
    model, lines = arguments.model_name, list[str]()
    if arguments.boolean_parameter("ENABLE_WEIGHT_SHARING", False):
        lines.append(
            f"parameter 'ENABLE_WEIGHT_SHARING' of model '{model}' has no effect: every instance has its own process"
        )
    if arguments.boolean_parameter("ENABLE_NVFUSER", False):
        lines.append(f"parameter 'ENABLE_NVFUSER' of model '{model}' has no effect: PyTorch has no NvFuser any more")
    if arguments.kind == "CPU" and arguments.boolean_parameter("ENABLE_CACHE_CLEANING", False):
        lines.append(
            f"parameter 'ENABLE_CACHE_CLEANING' of model '{model}' has no effect: the instance runs on the CPU"
        )
    return lines


def _optional_flag(arguments: ModelArguments, key: str) -> bool | None:
    return None if arguments.parameter(key) is None else arguments.boolean_parameter(key, False)
