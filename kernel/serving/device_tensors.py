"""Which models take and leave tensors in memory of devices, where other workers read and leave them too. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel.config.generated.model_config_pb2 import ModelInstanceGroup
from shm.tensor import RequestedOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kernel.serving.model import Model

    #: Returns a version for a request, by name, version and the preferred namespace; None if there is none.
    Find = Callable[[str, str, str], Model | None]


def takes_device_tensors(model: Model, inputs: Iterable[str], find: Find) -> bool:
    """Whether the model can read these of its inputs where a worker has left them on a device.

    All of its instances must be on GPUs: reading a device from elsewhere would cost a context of it. The key of the
    response cache is made in a process without a device. An ensemble takes an input there if one step, and nothing
    else, reads it, once, and the model of that step takes it: who reads a tensor on a device may change it.
    """
    if model.spec.response_cache:
        return False
    if model.spec.ensemble is not None:
        return not model.spec.decoupled and all(_step_takes(model, name, find) for name in inputs)
    groups = model.config.instance_group
    return bool(groups) and all(group.kind == ModelInstanceGroup.KIND_GPU for group in groups)


def _step_takes(ensemble: Model, tensor: str, find: Find) -> bool:
    assert ensemble.spec.ensemble is not None
    if tensor in ensemble.spec.outputs:  # it is a part of the response, too
        return False
    steps = ensemble.spec.ensemble.steps
    readers = [(step, name) for step in steps for name, read in step.inputs.items() if read == tensor]
    if len(readers) != 1:
        return False
    [(step, name)] = readers
    model = find(step.model_name, step.model_version, step.namespace)
    return model is not None and takes_device_tensors(model, [name], find)


def leaves_device_tensors(model: Model, find: Find) -> bool:
    """Whether an instance of the model, or of one of its steps, may leave an output on a device.

    The response cache needs its bytes.
    """
    if model.spec.response_cache:
        return False
    if model.spec.ensemble is not None:
        models = (find(step.model_name, step.model_version, step.namespace) for step in model.spec.ensemble.steps)
        return any(each is not None and leaves_device_tensors(each, find) for each in models)
    return any(group.kind == ModelInstanceGroup.KIND_GPU for group in model.config.instance_group)


def outputs_on_devices(model: Model, outputs: Iterable[RequestedOutput]) -> list[RequestedOutput]:
    """Return the requested outputs, all of the model if there are none, as those that may stay on a device."""
    names = [output.name for output in outputs] or list(model.spec.outputs)
    return [RequestedOutput(name, on_device=True) for name in names]
