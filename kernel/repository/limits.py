"""What model configurations may ask for that this server cannot do yet: refused, or said in the log.

A configuration is never accepted and then quietly not followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.errors import Unsupported

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig


#: Each instance is a process.
MAX_INSTANCES = 1024


def refuse_unsupported(config: ModelConfig) -> None:
    """Raise `Unsupported` for what would change a model's answers if it were left out, or is out of reach."""
    instances = sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
    if instances > MAX_INSTANCES:
        raise Unsupported(
            f"model '{config.name}' asks for {instances} instances, each of which is a process: at most "
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


def ignored_settings(config: ModelConfig) -> list[str]:
    """Return what has no effect here, one phrase each: performance features that change no answer."""
    found: list[str] = []
    if config.response_cache.enable:
        found.append("response_cache (every request is executed)")
    if config.dynamic_batching.preserve_ordering:
        found.append("dynamic_batching.preserve_ordering with more than one instance")
    if any(group.HasField("rate_limiter") for group in config.instance_group):
        found.append("rate_limiter (instances run whenever they are idle)")
    if config.model_repository_agents.agents:
        found.append("model_repository_agents")
    if any(group.secondary_devices for group in config.instance_group):
        found.append("instance_group.secondary_devices")
    if config.cc_model_filenames:
        found.append("cc_model_filenames (there is no GPU whose compute capability would choose one)")
    return found
