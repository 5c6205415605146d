"""Which settings under `optimization` of a configuration have no effect in this server. Pure.

They only make things faster, so a model that has them is served, and the log says which they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelInstanceGroup, ModelOptimizationPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.config.generated.model_config_pb2 import ModelConfig

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
