"""The kernel's access to GPUs: regions of clients, the list of GPUs, their figures.

Without cuda-bindings or a driver it does nothing. All of it is done by one process, because a driver can hang or end
it. The process starts when it is first needed, and keeps memory that clients have registered open as long as it is
registered.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from backends.helper.process import Helper
from kernel.errors import InvalidArgument
from kernel.observe.limited_log import LimitedLog
from kernel.repository.gpus import NoGpus, PinnedPool
from kernel.server_parts import ServerPart
from shm.cuda import HANDLE_BYTE_SIZE, TOO_SMALL, UNAVAILABLE, has_driver, is_installed
from shm.region import CudaIpcHandle
from shm.tensor import Span

if TYPE_CHECKING:
    from backends.launch.launcher import Launcher
    from kernel.observe.gpu_figures import GpuFigureReader
    from kernel.repository.gpus import GpuOptions, ServerGpus
    from shm.region import Region


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
        from backends.supervision.gpus import FoundDevices  # few servers have GPUs
        from kernel.observe.gpu_figures import GpuFigureReader

        self.gpus = found = FoundDevices(self.regions.helper, settings)
        self.reader = GpuFigureReader(found, self.pinned_pool, figures_interval_ms)

    async def close(self) -> None:
        """Stop the process."""
        if self.reader is not None:
            await self.reader.close()
        if self.regions is not None:
            await self.regions.close()


#: A client may try to register any number of regions.
_refusals = LimitedLog(logging.getLogger(__name__), logging.WARNING)

#: How long a driver may take to start and to open a handle, in seconds. Eight GPUs without persistence mode take more
#: than 30 s.
CHECK_TIMEOUT_S = 120.0

#: For one byte of each region at a time.
_ARENA_BYTE_SIZE = 1 << 20


class DeviceRegions:
    """Implements `kernel.memory.client_regions.DeviceMemoryCheck`."""

    def __init__(self, launcher: Launcher) -> None:
        """`launcher` starts processes that were not forked from one that has used a driver."""
        #: The process. It also does what `backends.helper.device_tasks` has.
        self.helper = Helper(launcher, _ARENA_BYTE_SIZE, title="device helper", task_timeout_s=CHECK_TIMEOUT_S)
        #: Why there is no GPU; empty while there may be one.
        self._unavailable = ""

    async def check(self, region: Region) -> None:
        if not self._unavailable:
            lease = region.lease()
            try:
                copy = await self.helper.read(Span(lease, region.byte_size - 1, 1))
                copy.lease.release()
                return
            except InvalidArgument as error:
                self._explain(region, error.message)
            finally:
                lease.release()
        raise InvalidArgument(f"failed to register CUDA shared memory region: '{region.name}', GPUs not supported")

    def _explain(self, region: Region, text: str) -> None:
        """Log the reason, and raise `InvalidArgument` with the text that Triton has for it, if there is a GPU."""
        _refusals.log(
            "CUDA shared memory regions", "the CUDA shared memory region '%s' is not registered: %s", region.name, text
        )
        if text.startswith(UNAVAILABLE):
            self._unavailable = text
        elif isinstance(region.handle, CudaIpcHandle) and len(region.handle.raw) != HANDLE_BYTE_SIZE:
            raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
        elif text.startswith(TOO_SMALL):
            raise InvalidArgument(f"failed to register shared memory region '{region.name}': invalid args")
        else:
            raise InvalidArgument("failed to register shared memory region: invalid args")

    async def close(self) -> None:
        """Stop the process."""
        await self.helper.close()
