"""The GPUs of the server: detected once, in the process that opens memory of GPUs, when they are first needed."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

import msgspec

from kernel.errors import ServingError
from kernel.observe.gpu_figures import FIND_GPUS, READ_FIGURES, FoundGpus, ReadFigures
from kernel.repository.gpus import check_room, usable_gpus
from kernel.serving.helper_tasks import MessageTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backends.helper.process import Helper
    from kernel.observe.gpu_figures import FoundGpu, GpuFigures
    from kernel.repository.gpus import GpuSettings, UsableGpus

logger = logging.getLogger(__name__)

#: After a driver could not say which GPUs there are, loads look again when this number of seconds has passed.
FIND_AGAIN_S = 20

#: After this many failures in a row, figures are not read any more.
_MAX_FAILURES = 3


class FoundDevices:
    """Implements `kernel.repository.gpus.ServerGpus`."""

    possible = True

    def __init__(self, helper: Helper, settings: GpuSettings) -> None:
        """`helper` runs the tasks of `backends.helper.device_tasks`."""
        self._helper = helper
        self.settings = settings
        self._one_task = asyncio.Lock()
        #: All that CUDA sees; None before they were looked for.
        self._gpus: list[FoundGpu] | None = None
        #: When a driver that could not respond is asked again, in seconds of the loop's clock.
        self._again_s = 0.0
        self._failures = 0
        #: By backend: why it cannot compute on a GPU; "" if it can.
        self._obstacles: dict[str, str] = {}

    @property
    def found(self) -> Sequence[FoundGpu]:
        """The GPUs that were found; none before they were looked for."""
        return self._gpus or ()

    @property
    def visible(self) -> str:
        """As `ServerGpus.visible`. MIG devices stay as they were chosen: CUDA does not say their names."""
        chosen = [os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")]
        if any("MIG" in names for names in chosen) or any(gpu.is_mig for gpu in self.found):
            return ""
        return ",".join(gpu.uuid for gpu in self.found)

    async def usable(self) -> UsableGpus:
        least = self.settings.least_capability
        await self._find()
        unusable_by = frozenset(backend for backend, obstacle in self._obstacles.items() if obstacle)
        gpus = usable_gpus([gpu.capability for gpu in self.found], least)
        return msgspec.structs.replace(gpus, unusable_by=unusable_by)

    def obstacle_of(self, backend: str) -> str | None:
        return self._obstacles.get(backend)

    def note(self, backend: str, obstacle: str) -> None:
        """As `ServerGpus.note`. The log has a line for a backend that cannot use the GPUs that are there."""
        if obstacle and backend not in self._obstacles:
            logger.warning(
                "models of backend '%s' run on the CPU unless their configuration says KIND_GPU: %s", backend, obstacle
            )
        self._obstacles[backend] = obstacle

    async def _find(self) -> None:
        if self._gpus is not None:
            return
        now_s = asyncio.get_running_loop().time
        async with self._one_task:
            if self._gpus is not None or now_s() < self._again_s:
                return
            try:
                found = msgspec.json.decode(await self._run(MessageTask(FIND_GPUS)), type=FoundGpus)
            except ServingError as error:  # a driver that hangs, or that has ended the process
                found = FoundGpus(unavailable=error.message, is_passing=True)
            if found.is_passing:
                self._again_s = now_s() + FIND_AGAIN_S
                logger.warning(
                    "no GPU can be used yet: %s. Loads after the next %d s look again", found.unavailable, FIND_AGAIN_S
                )
                return
            self._gpus = found.gpus
        if found.unavailable:
            logger.info("no GPU is used: %s", found.unavailable)
        for number, gpu in enumerate(found.gpus):
            usable = usable_gpus([gpu.capability], self.settings.least_capability).ids
            logger.info(
                "GPU %d: %s, %s, %d MiB, compute capability %d.%d%s",
                number, gpu.name, gpu.uuid, gpu.byte_size >> 20, *gpu.capability,
                "" if usable else ", which is too low",
            )  # fmt: skip

    async def _run(self, task: MessageTask) -> bytes:
        result, output = await self._helper.run(task)
        if output is not None:
            output.release()
        return bytes(result)

    async def figures(self) -> list[GpuFigures]:
        """Return the figures of the GPUs that were found; none if they cannot be read."""
        if not self.found or self._failures >= _MAX_FAILURES:
            return []
        arguments = msgspec.json.encode([gpu.uuid for gpu in self.found])
        async with self._one_task:
            try:
                read = msgspec.json.decode(await self._run(MessageTask(READ_FIGURES, arguments)), type=ReadFigures)
            except ServingError as error:
                read = ReadFigures(unavailable=error.message)
        if read.unavailable:
            self._failures += 1
            logger.warning("the metrics of the GPUs cannot be read: %s", read.unavailable)
        else:
            self._failures = 0
        return read.figures

    async def check_room(self, instance: str, device_id: int) -> None:
        """See `ServerGpus`. Where the memory in use is not known, there is room."""
        limit = self.settings.load_limits.get(device_id)
        if limit is None:
            return
        figures = await self.figures()
        if device_id < len(figures):
            used, total = figures[device_id].used_byte_size, figures[device_id].total_byte_size
            if used is not None and total is not None:
                check_room(instance, device_id, used, total, limit)
