"""The GPUs that configurations may name. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from kernel.config.generated.model_config_pb2 import ModelConfig

#: What tritonserver is built with.
LEAST_CAPABILITY = 6.0


#: KIND_CPU and KIND_MODEL of ModelInstanceGroup.Kind: the options import this module, and need no protobuf.
_ELSEWHERE = (2, 3)


class UsableGpus(msgspec.Struct, frozen=True):
    """The GPUs of the server that are new enough."""

    #: Their numbers, ascending.
    ids: tuple[int, ...] = ()
    #: The lowest compute capability of those that are new enough.
    least_capability: float = LEAST_CAPABILITY
    #: The backends that cannot compute on a GPU as they are installed: instances of KIND_AUTO run on the CPU.
    unusable_by: frozenset[str] = frozenset()
    #: Instances that are configured for a GPU run on the CPU (--gpu-kind=cpu); then there are no `ids`.
    on_cpu: bool = False

    @classmethod
    def first(cls, count: int) -> UsableGpus:
        """Return the GPUs 0 to `count` - 1."""
        return cls(tuple(range(count)))


NO_GPUS = UsableGpus()
ON_CPU = UsableGpus(on_cpu=True)


def may_use_gpus(config: ModelConfig) -> bool:
    """Whether the instances run, or may run, on a GPU, so that the GPUs of the server must be known."""
    if config.HasField("ensemble_scheduling"):
        return False
    return not config.instance_group or any(group.kind not in _ELSEWHERE for group in config.instance_group)


def move_to_cpu(config: ModelConfig) -> bool:
    """Let the instances for GPUs run on the CPU; returns whether there are any."""
    groups = [group for group in config.instance_group if group.kind == group.KIND_GPU or group.gpus]
    for group in groups:
        group.kind = group.KIND_CPU
        group.ClearField("gpus")
        group.ClearField("profile")
        group.ClearField("secondary_devices")
    return bool(groups)
