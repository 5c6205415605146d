"""Starts each worker as an interpreter of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

from backends.launch.children import KernelChildren
from backends.launch.environments import ModelEnvironments
from backends.launch.launcher import not_shown
from backends.launch.local_process import LocalProcess, worker_ends
from backends.launch.output import OutputLimits
from backends.transport.zygote_messages import MARK
from kernel.machine import own_command
from kernel.repository.worker_needs import NO_NEEDS, WorkerNeeds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from backends.launch.launcher import Pending
    from backends.launch.local_process import ChildProcess, WorkerEnds
    from backends.launch.watcher_process import SessionWatcher

_DEFAULT_LIMITS = OutputLimits()


class SpawningLauncher:
    """Starts workers on this machine, each as a new interpreter."""

    def __init__(
        self,
        *,
        shared_memory: bool = True,
        task_module: str = "",
        output_limits: OutputLimits = _DEFAULT_LIMITS,
        watcher: SessionWatcher | None = None,
        children: KernelChildren | None = None,
        environments: ModelEnvironments | None = None,
    ) -> None:
        """Without `shared_memory` tensors are sent over the connection, as to workers of other hosts.

        `task_module` is the module whose functions helpers run as tasks. `output_limits` are for what each worker
        prints. `watcher` ends what models have started. `children` records the workers. `environments` are those that
        models have of their own.
        """
        self.shared_memory = shared_memory
        self.output_limits = output_limits
        self.task_module = task_module
        self.watcher = watcher
        self.children = children or KernelChildren()
        self.environments = environments or ModelEnvironments()

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> LocalProcess:
        """See `Launcher`. Prepares the environment of the model first, if it has one, which may take minutes."""
        launched = await self._launch(title, helper=helper, needs=needs, pending=pending)
        if needs.memory_limit_byte_size:
            launched.limit_memory(needs.memory_limit_byte_size)
        return launched

    async def _launch(self, title: str, *, helper: bool, needs: WorkerNeeds, pending: Pending) -> LocalProcess:
        options = [] if self.shared_memory or helper else ["--remote"]
        variables = {**os.environ, "CUDA_VISIBLE_DEVICES": needs.visible_gpus} if needs.visible_gpus else os.environ
        if needs.environment is not None:
            async with self.environments.use(needs.environment, title, self, pending) as used:
                own = (
                    {**used.variables, "CUDA_VISIBLE_DEVICES": needs.visible_gpus}
                    if needs.visible_gpus
                    else used.variables
                )
                return self.start(title, used.command, options, own, used.fds)
        if helper:
            options.append(f"--helper={self.task_module}")
        options += [f"--preload={module}" for module in needs.preload.modules]
        if needs.preload.file:
            options.append(f"--preload-file={needs.preload.file}")
        return self.start(title, own_command("backends.worker"), options, variables)

    def start(
        self,
        title: str,
        command: Sequence[str],
        options: Sequence[str] = (),
        variables: Mapping[str, str] = os.environ,
        fds: Sequence[int] = (),
    ) -> LocalProcess:
        """Start a process of ours: a program that takes the options of `backends.worker`. Raises `OSError`.

        The process has the descriptors `fds` too.
        """
        mark = self.children.new_mark()
        with worker_ends(title, self.output_limits) as ends:
            fd, stdout, stderr = ends.worker_fds
            # A session of its own: only the kernel gets signals of the terminal, and the worker can be killed
            # together with the processes that its model started.
            process = subprocess.Popen(
                [*command, f"--model={title}", f"--fd={fd}", f"--kernel={os.getpid()}", *options],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[fd, *fds],
                start_new_session=True,
                env={**variables, MARK: mark},
            )
            return self.watched(process, ends, mark)

    def watched(self, process: ChildProcess, ends: WorkerEnds, mark: str) -> LocalProcess:
        """Return a worker that has just been started. Raises `OSError` if no descriptor is left to watch it."""
        try:
            launched = LocalProcess(process, ends.kernel_socket, ends.capture, self.watcher)
        except OSError:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            raise
        self.children.add(process.pid, mark)
        launched.on_ended(lambda: self.children.remove(launched.pid))
        return launched
