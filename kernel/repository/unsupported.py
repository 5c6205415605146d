"""Settings of model configurations that this server does not support yet.

Such a setting is never ignored silently: the model is refused if responses would change, else the log has a warning.

Which settings under `optimization` of a configuration have no effect in this server. Pure.

They only make things faster, so a model that has them is served, and the log says which they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelInstanceGroup, ModelOptimizationPolicy
from kernel.config.model_parameters import BATCHING, autoscale_settings
from kernel.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.generated.model_config_pb2 import ModelConfig


#: The most instances of one model. Each instance is a process.
MAX_INSTANCES = 1024


#: Triton's parameter for a shared library with batching rules.
_BATCH_STRATEGY_PATH = "TRITON_BATCH_STRATEGY_PATH"


def refuse_batching_library(config: ModelConfig, library: str) -> None:
    """Raise `Unsupported` for a shared library with batching rules, unless the model names a rule of a package.

    `library` is the path of one beside the model, if there is any. With sequence batching Triton does not use it.
    """
    if BATCHING in config.parameters or config.HasField("sequence_batching"):
        return
    if _BATCH_STRATEGY_PATH in config.parameters:
        library = f"parameter {_BATCH_STRATEGY_PATH}, '{config.parameters[_BATCH_STRATEGY_PATH].string_value}'"
    if library:
        raise Unsupported(
            f"model '{config.name}' has a batching library ({library}). This server loads no code beside a model into "
            "its own process: install the rule as a Python package with an entry point of the group 'naiad.batching', "
            f"and name it in the model's parameter '{BATCHING}' (docs/batching.md)"
        )


def refuse_unsupported(config: ModelConfig) -> None:
    """Raise `Unsupported` for too many instances, and for features without which responses would be wrong."""
    instances = sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
    scaling = autoscale_settings(config)
    instances = max(instances, scaling.max if scaling is not None else 0)
    if instances > MAX_INSTANCES:
        raise Unsupported(
            f"model '{config.name}' asks for {instances} instances; each instance is a process, and at most "
            f"{MAX_INSTANCES} are allowed"
        )


def ignored_settings(config: ModelConfig, *, cache: bool, limiter: bool) -> list[str]:
    """Return one phrase for each setting that has no effect in this server and does not change responses.

    `cache` and `limiter` say whether the server has a response cache and a rate limiter.
    """
    found: list[str] = []
    if config.response_cache.enable and not cache:
        found.append("response_cache (the server is started without --cache-config)")
    if config.batch_input and config.backend == "python":  # nor does it have one in Triton
        found.append("batch_input (a Python model gets the tensors of each request, with their shapes)")
    if not limiter and any(group.HasField("rate_limiter") for group in config.instance_group):
        found.append("rate_limiter (the server is started without --rate-limit=execution_count)")
    if any(group.secondary_devices for group in config.instance_group):
        found.append("instance_group.secondary_devices")
    if config.cc_model_filenames and not _chooses_file(config):
        found.append("cc_model_filenames (only for models of TensorRT, and of ONNX and PyTorch on a GPU)")
    return found + ignored_optimizations(config)


def _chooses_file(config: ModelConfig) -> bool:
    """Whether instances choose the model file by the compute capability of their GPU."""
    on_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    return config.backend == "tensorrt" or (on_gpu and config.backend in ("onnxruntime", "pytorch"))


#: The only backend that has accelerators and a level of graph optimizations.
_ONNX = "onnxruntime"

#: The only backend with priorities.
_TENSORRT = "tensorrt"

#: The settings of CUDA graphs, which models of these backends have on a GPU.
_GRAPHS = ("graphs", "graph_spec")

_WITH_GRAPHS = (_TENSORRT, _ONNX)

_Accelerator = ModelOptimizationPolicy.ExecutionAccelerators.Accelerator


def ignored_optimizations(config: ModelConfig) -> list[str]:
    """Return one phrase for each setting of a complete configuration that has no effect."""
    optimization, found = config.optimization, list[str]()
    accelerators = optimization.execution_accelerators
    on_gpu = any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group)
    if accelerators.gpu_execution_accelerator and (config.backend != _ONNX or not on_gpu):
        reason = "no instance runs on a GPU" if not on_gpu else _not_supported_by(config.backend)
        found.append(_accelerators("gpu", accelerators.gpu_execution_accelerator, reason))
    if accelerators.cpu_execution_accelerator and config.backend != _ONNX:
        found.append(_accelerators("cpu", accelerators.cpu_execution_accelerator, _not_supported_by(config.backend)))
    if optimization.HasField("graph") and config.backend != _ONNX:
        found.append(f"optimization.graph ({_not_supported_by(config.backend)})")
    found += _cuda(config, on_gpu)
    if config.backend != _TENSORRT and optimization.priority != ModelOptimizationPolicy.PRIORITY_DEFAULT:
        known = ModelOptimizationPolicy.ModelPriority.DESCRIPTOR.values_by_number.get(optimization.priority)
        # A protobuf enum field may contain a number that has no name.
        name = known.name if known is not None else optimization.priority
        found.append(f"optimization.priority {name} (only for TensorRT models)")
    if optimization.gather_kernel_buffer_threshold:
        found.append("optimization.gather_kernel_buffer_threshold (only for tensors on a GPU)")
    if optimization.eager_batching:
        found.append("optimization.eager_batching (a batch is gathered when its instance is idle)")
    if config.model_operations.op_library_filename and config.backend != _ONNX:
        found.append(f"model_operations ({_not_supported_by(config.backend)})")
    return found


def _cuda(config: ModelConfig, on_gpu: bool) -> list[str]:
    names = [descriptor.name for descriptor, _ in config.optimization.cuda.ListFields()]
    reason = "only for TensorRT models, and ONNX models on a GPU"
    if config.backend == _TENSORRT or (config.backend in _WITH_GRAPHS and on_gpu):
        names = [name for name in names if name not in _GRAPHS]
        reason = "a batch is waited for once, without a busy processor"
    return [f"optimization.cuda {{ {' '.join(names)} }} ({reason})"] if names else []


def _accelerators(kind: str, accelerators: Iterable[_Accelerator], reason: str) -> str:
    names = ", ".join(f"'{each.name}'" for each in accelerators)
    return f"optimization.execution_accelerators.{kind}_execution_accelerator {names} ({reason})"


def _not_supported_by(backend: str) -> str:
    return f"the backend '{backend}' has none"
