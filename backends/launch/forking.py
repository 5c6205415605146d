"""Starts workers as forks of a process that has already imported what they need (`backends/zygote/zygote.py`).

A fork is ready after a few milliseconds, and shares the memory of what was imported. docs/decisions/forked-workers.md
has the reasons for how it is done.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import msgspec

from backends.launch.launcher import not_shown
from backends.launch.local_process import worker_ends
from backends.launch.zygote_process import BackendLeavesThreads, PreloadLeavesThreads, ZygoteLost
from backends.transport.zygote_messages import ForkWorker
from kernel.errors import InvalidArgument, Unavailable
from kernel.repository.worker_needs import NO_NEEDS, PreloadSet, WorkerNeeds

if TYPE_CHECKING:
    from backends.launch.launcher import Pending
    from backends.launch.local_process import LocalProcess, WorkerEnds
    from backends.launch.spawning import ModelEnvironments, SpawningLauncher
    from backends.launch.zygote_pool import ZygotePool

logger = logging.getLogger(__name__)

#: How often a worker is tried to be forked before it is spawned, or fails.
_ATTEMPTS = 3


class ForkedChild(msgspec.Struct, frozen=True):
    """A forked worker, see `ChildProcess`."""

    pid: int

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class ForkingLauncher:
    """Forks workers. Spawns workers that must not be forked, and all workers if no zygote can be started."""

    def __init__(self, spawning: SpawningLauncher, zygotes: ZygotePool, *, always: bool) -> None:
        """With `always` a worker is forked whatever its model needs, and never spawned in place of a fork."""
        self._spawning = spawning
        self._zygotes = zygotes
        self._always = always

    @property
    def shared_memory(self) -> bool:
        return self._spawning.shared_memory

    @property
    def environments(self) -> ModelEnvironments:
        return self._spawning.environments

    async def launch(
        self, title: str, *, helper: bool = False, needs: WorkerNeeds = NO_NEEDS, pending: Pending = not_shown
    ) -> LocalProcess:
        """See `Launcher`. Raises `InvalidArgument` if what the model wants to be preloaded cannot be imported."""
        if needs.environment is not None:  # another interpreter: nothing of the zygote's could be shared
            return await self._spawning.launch(title, helper=helper, needs=needs, pending=pending)
        # It is not known whether GPU drivers work in forks of a process that has never used them.
        if needs.gpu and not self._always:
            return await self._spawning.launch(title, helper=helper, needs=needs, pending=pending)
        if not self._always and self._zygotes.threads_left_by(needs.preload):
            return await self._spawning.launch(title, helper=helper, needs=needs, pending=pending)
        try:
            launched = await self._fork(title, helper=helper, needs=needs)
            if needs.memory_limit_byte_size:
                launched.limit_memory(needs.memory_limit_byte_size)
            return launched
        except PreloadLeavesThreads as error:
            self._refuse_or_log(title, needs.preload, str(error))
        except ZygoteLost as error:
            if self._always or needs.preload != PreloadSet():
                raise Unavailable(f"the worker could not be forked: {error}") from None
            logger.warning("the worker of '%s' is started without a fork: %s", title, error)
        return await self._spawning.launch(title, helper=helper, needs=needs, pending=pending)

    def _refuse_or_log(self, title: str, preload: PreloadSet, threads: str) -> None:
        """Nothing can be forked after a preload that has left `threads`. Raises `InvalidArgument` if all must be."""
        what = f"after '{preload.title}' there are {threads}"
        if self._always:
            raise InvalidArgument(
                f"the preload failed: {what}. Only what starts no threads can be imported before workers are forked "
                "(--worker-start=fork)"
            )
        self._zygotes.is_unsafe(preload, threads)
        logger.warning(
            "the workers of '%s' are started without forks, which takes more memory and time: %s, and a fork would "
            "have none of them. A preload should only import, and compute nothing",
            title, what,
        )  # fmt: skip

    async def _fork(self, title: str, *, helper: bool, needs: WorkerNeeds) -> LocalProcess:
        """Fork the worker. If a zygote dies, try another one. Raises `ZygoteLost` if all of them die."""
        spawning = self._spawning
        mark = spawning.children.new_mark()
        request = ForkWorker(
            0,
            title,
            mark,
            backend="" if helper else needs.backend,
            remote=not (spawning.shared_memory or helper),
            task_module=spawning.task_module if helper else "",
        )
        with worker_ends(title, spawning.output_limits) as ends:
            lost = ZygoteLost()
            for _ in range(_ATTEMPTS):
                late = request.backend in self._zygotes.imported_late
                request = msgspec.structs.replace(request, imports_late=late)
                try:
                    return await self._fork_once(request, ends, needs.preload)
                except BackendLeavesThreads as error:
                    lost = ZygoteLost(f"imports before a fork left {error}")
                    if late:
                        self._zygotes.give_up(str(lost))
                    self._zygotes.imported_late.add(request.backend)
                except ZygoteLost as error:
                    lost = error
            raise lost

    async def _fork_once(self, request: ForkWorker, ends: WorkerEnds, preload: PreloadSet) -> LocalProcess:
        children = self._spawning.children
        zygote = self._zygotes.join(preload)
        try:
            await zygote.ready()
            # Until the worker is recorded, it must not be mistaken for a process that a model has left behind.
            with children.forking():
                pid = await zygote.fork(request, ends.worker_fds)
                launched = self._spawning.watched(ForkedChild(pid), ends, request.mark)
        except BaseException:
            self._zygotes.leave(preload)
            raise
        self._zygotes.has_forked(preload)
        launched.on_ended(lambda: self._zygotes.leave(preload))
        return launched
