"""Settings of model configurations that this server does not support yet.

Such a setting is never ignored silently: the model is refused if responses would change, else the log has a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import Unsupported

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig


#: The most instances of one model. Each instance is a process.
MAX_INSTANCES = 1024


def refuse_unsupported(config: ModelConfig) -> None:
    """Raise `Unsupported` for too many instances, and for features without which responses would be wrong."""
    instances = sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
    if instances > MAX_INSTANCES:
        raise Unsupported(
            f"model '{config.name}' asks for {instances} instances; each instance is a process, and at most "
            f"{MAX_INSTANCES} are allowed"
        )
    if config.HasField("ensemble_scheduling") or config.platform == "ensemble":
        raise Unsupported(f"model '{config.name}' is an ensemble, which this version of the server cannot run yet")
    if config.HasField("sequence_batching"):
        raise Unsupported(
            f"model '{config.name}' needs sequence batching, which this version of the server does not have yet"
        )
    if config.batch_input or config.batch_output or any(i.allow_ragged_batch for i in config.input):
        raise Unsupported(
            f"model '{config.name}' needs ragged batching (allow_ragged_batch, batch_input or batch_output), which "
            "this version of the server does not have yet"
        )


def ignored_settings(config: ModelConfig, *, cache: bool, limiter: bool) -> list[str]:
    """Return one phrase for each setting that has no effect in this server and does not change responses.

    `cache` and `limiter` say whether the server has a response cache and a rate limiter.
    """
    found: list[str] = []
    if config.response_cache.enable and not cache:
        found.append("response_cache (the server is started without --cache-config)")
    if config.dynamic_batching.preserve_ordering:
        found.append("dynamic_batching.preserve_ordering with more than one instance")
    if not limiter and any(group.HasField("rate_limiter") for group in config.instance_group):
        found.append("rate_limiter (the server is started without --rate-limit=execution_count)")
    if config.model_repository_agents.agents:
        found.append("model_repository_agents")
    if any(group.secondary_devices for group in config.instance_group):
        found.append("instance_group.secondary_devices")
    if config.cc_model_filenames:
        found.append("cc_model_filenames (the server uses no GPU)")
    return found
