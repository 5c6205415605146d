"""The kernel's access to GPUs: regions of clients, the list of GPUs, their figures. One process does all of it.

Without cuda-bindings or a driver it does nothing; the process starts when it is first needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backends.supervision.devices.device_regions import DeviceRegions
from kernel.repository.gpus import NoGpus, PinnedPool
from kernel.serving.front_doors.server_parts import ServerPart
from shm.cuda import has_driver, is_installed

if TYPE_CHECKING:
    from backends.supervision.launcher import Launcher
    from kernel.observe.reporting.gpu_figures import GpuFigureReader
    from kernel.repository.gpus import GpuOptions, ServerGpus


class ServerDevices(ServerPart):
    """What the kernel has of GPUs. A part of the server."""

    def __init__(self, launcher: Launcher, options: GpuOptions, figures_interval_ms: int) -> None:
        """The figures are read when they are asked for, at most once in an interval. Raises `InvalidArgument`."""
        settings = options.settings()
        self.pinned_pool = PinnedPool(settings.pinned_byte_size)
        self.gpus: ServerGpus = NoGpus(settings)
        #: None if no GPU can be used.
        self.regions: DeviceRegions | None = None
        self.reader: GpuFigureReader | None = None
        if not is_installed():
            return
        self.regions = DeviceRegions(launcher)
        if not has_driver():
            return
        from backends.supervision.devices.gpus import FoundDevices  # few servers have GPUs
        from kernel.observe.reporting.gpu_figures import GpuFigureReader

        self.gpus = found = FoundDevices(self.regions.helper, settings)
        self.reader = GpuFigureReader(found, self.pinned_pool, figures_interval_ms)

    async def close(self) -> None:
        """Stop the process."""
        if self.reader is not None:
            await self.reader.close()
        if self.regions is not None:
            await self.regions.close()
