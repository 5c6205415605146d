"""Which models take and leave tensors in memory of devices, where other workers read and leave them too. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelInstanceGroup
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernel.serving.model import Model


def takes_device_tensors(model: Model) -> bool:
    """Whether each instance of the model can read an input that a worker has left on a device.

    The instances must be on GPUs: reading a device from elsewhere would cost a context of it. The key of the response
    cache is made in a process without a device. An ensemble is not asked: the models of its steps differ.
    """
    groups = model.config.instance_group
    return (
        bool(groups)
        and all(group.kind == ModelInstanceGroup.KIND_GPU for group in groups)
        and model.spec.ensemble is None
        and not model.spec.response_cache
    )


def leaves_device_tensors(model: Model) -> bool:
    """Whether an instance of the model may leave an output on a device. The response cache needs its bytes."""
    return (
        any(group.kind == ModelInstanceGroup.KIND_GPU for group in model.config.instance_group)
        and model.spec.ensemble is None
        and not model.spec.response_cache
    )


def outputs_on_devices(model: Model, outputs: Iterable[RequestedOutput]) -> list[RequestedOutput]:
    """Return the requested outputs, all of the model if there are none, as those that may stay on a device."""
    names = [output.name for output in outputs] or list(model.spec.outputs)
    return [RequestedOutput(name, on_device=True) for name in names]
