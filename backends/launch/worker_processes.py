"""What all workers and helpers of a server share: how they are started, and what ends with them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from backends.launch.children import KernelChildren
from backends.launch.forking import ForkingLauncher
from backends.launch.spawning import ModelEnvironments, SpawningLauncher
from backends.launch.watcher_process import SessionWatcher
from backends.launch.zygote_pool import ZygotePool
from kernel.server_parts import ServerPart

if TYPE_CHECKING:
    from backends.launch.output import OutputLimits
    from backends.launch.zygote_start import StartedZygote
    from kernel.repository.execution_environment import EnvironmentSettings

logger = logging.getLogger(__name__)

#: The module with the functions that the device helper runs.
_DEVICE_TASKS = "backends.helper.device_tasks"


class WorkerProcesses(ServerPart):
    """Makes the launchers of a server, on its loop. `close` follows after all workers have ended."""

    def __init__(
        self,
        worker_start: str,
        *,
        shared_memory: bool,
        output_limits: OutputLimits,
        task_module: str,
        zygote: StartedZygote | None = None,
        environments: EnvironmentSettings | None = None,
    ) -> None:
        """`worker_start` is `fork`, `spawn`, or `auto`: forks where they are known to be safe, where the system can.

        To fork workers, this process becomes a subreaper. Raises `OSError` for `fork` on a system that cannot do that.
        `zygote` is the first zygote if that was started before: it is taken over, or ended if nothing can be forked.
        `environments` are the settings of those that models have of their own. See `SpawningLauncher` for the others.
        """
        children = self._children = KernelChildren()
        watcher = self._watcher = SessionWatcher(children)
        self._zygotes: ZygotePool | None = None
        models = SpawningLauncher(
            shared_memory=shared_memory, output_limits=output_limits, watcher=watcher, children=children,
            environments=ModelEnvironments(environments),
        )  # fmt: skip
        helpers = SpawningLauncher(
            task_module=task_module, output_limits=output_limits, watcher=watcher, children=children
        )
        #: Starts workers of models, and helpers.
        self.launcher: SpawningLauncher | ForkingLauncher = models
        self.helper_launcher: SpawningLauncher | ForkingLauncher = helpers
        #: Starts the process that uses GPUs for the kernel.
        self.device_launcher = SpawningLauncher(
            task_module=_DEVICE_TASKS, output_limits=output_limits, watcher=watcher, children=children
        )
        #: Starts front doors in processes of their own.
        self.door_launcher = SpawningLauncher(output_limits=output_limits, watcher=watcher, children=children)
        if worker_start == "spawn":
            return
        try:
            children.inherit(() if zygote is None else (zygote.process.pid,))
        except OSError as error:
            if zygote is not None:
                zygote.end()
            if worker_start == "fork":
                raise
            logger.warning("workers are started without forks, which takes longer: %s", error)
            return
        zygotes = self._zygotes = ZygotePool(children, output_limits)
        zygotes.start(zygote)
        always = worker_start == "fork"
        self.launcher = ForkingLauncher(models, zygotes, always=always)
        self.helper_launcher = ForkingLauncher(helpers, zygotes, always=always)

    async def close(self) -> None:
        """End the zygotes, the watcher, and what models have left behind."""
        if self._zygotes is not None:
            await self._zygotes.close()
        await self._watcher.close()
        await self._children.close()
