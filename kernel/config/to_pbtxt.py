"""`ModelConfig` → the text of a config.pbtxt, for people: without the defaults that every server fills in."""

from __future__ import annotations

from google.protobuf import text_format

from kernel.config.generated.model_config_pb2 import ModelConfig, ModelOptimizationPolicy, ModelVersionPolicy


def to_pbtxt(config: ModelConfig) -> str:
    """Return the text of a completed configuration. A server completes it to `config` again.

    Left out are the version policy `latest: 1`, pinned memory, and names of instance groups that follow from places.
    """
    shown = ModelConfig()
    shown.CopyFrom(config)
    if shown.version_policy == ModelVersionPolicy(latest=ModelVersionPolicy.Latest(num_versions=1)):
        shown.ClearField("version_policy")
    for field in ("input_pinned_memory", "output_pinned_memory"):
        if getattr(shown.optimization, field).enable:
            shown.optimization.ClearField(field)
    if shown.optimization == ModelOptimizationPolicy():
        shown.ClearField("optimization")
    for index, group in enumerate(shown.instance_group):
        if group.name == f"{config.name}_{index}":
            group.ClearField("name")
    return text_format.MessageToString(shown, use_short_repeated_primitives=True)
