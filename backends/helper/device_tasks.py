"""The device helper's tasks besides opening regions: it finds GPUs and reads their figures.

The drivers may hang or end the process; only the helper is affected. Only the helper imports this module, by its name.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import msgspec

from kernel.observe.gpu_figures import FIND_GPUS, READ_FIGURES, FoundGpu, FoundGpus, GpuFigures, ReadFigures
from kernel.serving.helper_tasks import TaskResult
from kernel.texts import install_command
from shm.cuda import CudaError, CudaUnavailable, cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernel.serving.helper_tasks import TaskFunction, TaskSteps

#: Names the module that takes the place of `pynvml`, for tests without a GPU.
NVML_VARIABLE = "NAIAD_NVML"

#: Version 2 of the memory figures of NVML: what is reserved for the driver is not in `used` (nvml.h).
MEMORY_V2 = 0x02000028


def find_gpus(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Return the GPUs that CUDA sees. Makes no context."""
    yield from ()
    try:
        devices = cuda()
        properties = [devices.properties(number) for number in range(devices.device_count)]
    except CudaUnavailable as error:
        return _no_gpus(str(error), error)
    except CudaError as error:
        return _no_gpus(f"their properties cannot be read: {error}", error)
    found = [FoundGpu(each.name, each.uuid, each.capability, each.byte_size, _is_mig(each.uuid)) for each in properties]
    return TaskResult(msgspec.json.encode(FoundGpus(found)))


def _no_gpus(text: str, error: CudaError | CudaUnavailable) -> TaskResult:
    cuda.cache_clear()  # a driver that is starting is asked again
    return TaskResult(msgspec.json.encode(FoundGpus(unavailable=text, is_passing=error.is_passing)))


def _is_mig(uuid: str) -> bool:
    """Whether CUDA's device of this UUID is a part of a GPU (MIG). Kubernetes chooses such parts without
    CUDA_VISIBLE_DEVICES. False where NVML cannot tell."""
    nvml, _ = _nvml()
    if nvml is None:
        return False
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return isinstance(error, getattr(nvml, "NVMLError_NotFound", ()))  # not a whole GPU of this container
    return bool(current)


def read_figures(arguments: bytes, sources: Sequence[memoryview]) -> TaskSteps:
    """Return the figures of the GPUs with the UUIDs of `arguments`, a list in JSON."""
    yield from ()
    uuids = msgspec.json.decode(arguments, type=list[str])
    nvml, unavailable = _nvml()
    if nvml is None:
        return TaskResult(msgspec.json.encode(ReadFigures(unavailable=unavailable)))
    return TaskResult(msgspec.json.encode(ReadFigures([_figures(nvml, uuid) for uuid in uuids])))


#: The module, after it was initialised.
_initialised: list[Any] = []


def _nvml() -> tuple[Any, str]:
    """Return the initialised module, or None and the reason."""
    if not _initialised:
        try:
            module = importlib.import_module(os.environ.get(NVML_VARIABLE) or "pynvml")
        except ImportError:
            return None, f"nvidia-ml-py is not installed: {install_command('gpu')}"
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            return None, f"NVML cannot be used: {error}"
        _initialised.append(module)
    return _initialised[0], ""


def _figures(nvml: Any, uuid: str) -> GpuFigures:
    found = GpuFigures(uuid)
    handle = _known(lambda: nvml.nvmlDeviceGetHandleByUUID(uuid), nvml)
    if handle is None:
        return found
    rates = _known(lambda: nvml.nvmlDeviceGetUtilizationRates(handle), nvml)
    memory = _known(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=MEMORY_V2), nvml)
    power = _known(lambda: nvml.nvmlDeviceGetPowerUsage(handle), nvml)
    limit = _known(lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle), nvml)
    energy = _known(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle), nvml)
    if rates is not None:
        found.utilization = rates.gpu / 100
    if memory is not None:
        found.total_byte_size, found.used_byte_size = int(memory.total), int(memory.used)
    # NVML has milliwatts and millijoules.
    found.power_w = None if power is None else power / 1000
    found.power_limit_w = None if limit is None else limit / 1000
    found.energy_j = None if energy is None else energy / 1000
    return found


def _known(read: Callable[[], Any], nvml: Any) -> Any:
    """Return what `read` returns; None for what this GPU does not have, such as the utilization of a MIG device."""
    try:
        return read()
    except nvml.NVMLError:
        return None


TASKS: dict[str, TaskFunction] = {FIND_GPUS: find_gpus, READ_FIGURES: read_figures}
