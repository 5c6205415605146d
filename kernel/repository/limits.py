"""Settings of model configurations that this server does not support yet.

Such a setting is never ignored silently: the model is refused if responses would change, else the log has a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.autoscale import autoscale_settings
from kernel.config.generated.model_config_pb2 import ModelInstanceGroup
from kernel.config.model_parameters import BATCHING
from kernel.errors import Unsupported
from kernel.repository.ignored_optimizations import ignored_optimizations

if TYPE_CHECKING:
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
