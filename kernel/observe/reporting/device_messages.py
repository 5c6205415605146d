"""What the device helper is asked about GPUs, and the results, in JSON (`backends/helper/device_tasks.py`)."""

from __future__ import annotations

import msgspec

from kernel.observe.reporting.gpu_figures import GpuFigures  # noqa: TC001 - msgspec reads annotations

FIND_GPUS, READ_FIGURES = "find_gpus", "read_figures"


class FoundGpu(msgspec.Struct):
    """A GPU that this machine has, in the order of CUDA's numbers."""

    name: str
    uuid: str
    capability: tuple[int, int]
    byte_size: int
    #: Whether `uuid` in CUDA_VISIBLE_DEVICES would not choose it: it is a part of a GPU (MIG), which CUDA shows under
    #: the name of the whole.
    is_mig: bool = False


class FoundGpus(msgspec.Struct):
    """The result of `find_gpus`; `unavailable` says why there is none."""

    gpus: list[FoundGpu] = []
    unavailable: str = ""
    #: Whether there may be GPUs in a while: their driver is starting.
    is_passing: bool = False


class ReadFigures(msgspec.Struct):
    """The result of `read_figures`, for the GPUs that were asked for; `unavailable` says why there are none."""

    figures: list[GpuFigures] = []
    unavailable: str = ""
