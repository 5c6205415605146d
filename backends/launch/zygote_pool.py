"""The zygotes of a server: one for all models, and one for each set of modules that models have chosen to preload.

The first one is started with the server and lives as long, so that a worker can be replaced at once. The others are
started when they are needed. They end when no worker of theirs has lived for a while, or to make room for another one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from backends.launch.launcher import Backoff
from backends.launch.zygote_process import ZygoteLost, ZygoteProcess
from kernel.repository.worker_needs import PreloadSet

if TYPE_CHECKING:
    from backends.launch.children import KernelChildren
    from backends.launch.output import OutputLimits
    from backends.launch.zygote_start import StartedZygote

logger = logging.getLogger(__name__)

#: The most zygotes of models that have chosen modules.
MAX_CHOSEN = 8

#: How long such a zygote is kept without workers, in seconds.
IDLE_S = 60.0

#: Of how many sets that cannot be preloaded before a fork the pool keeps the reason.
_MAX_UNSAFE = 256

_NOTHING_CHOSEN = PreloadSet()


class _Slot:
    """The place of a zygote for one set of modules, whether it runs or not."""

    def __init__(self) -> None:
        self.zygote: ZygoteProcess | None = None
        self.backoff = Backoff()
        #: Until then no other one is started after one has ended: a time of the loop.
        self.not_before = 0.0
        #: How many workers of it live or are being started.
        self.users = 0
        self.idle_timer: asyncio.TimerHandle | None = None


class ZygotePool:
    """Starts and ends zygotes."""

    def __init__(self, children: KernelChildren, output_limits: OutputLimits) -> None:
        self._children = children
        self._output_limits = output_limits
        #: The one that was used last is the last.
        self._slots: dict[PreloadSet, _Slot] = {}
        self._restart: asyncio.TimerHandle | None = None
        self._closed = False
        #: The zygotes that have not ended, and whether there are none.
        self._running: set[ZygoteProcess] = set()
        self._none_runs = asyncio.Event()
        #: Why workers cannot be forked on this system; "" if they can.
        self._problem = ""
        #: Backends whose import leaves threads: their workers import them after the fork.
        self.imported_late: set[str] = set()
        #: Set of modules → the threads that their import leaves: their workers are not forked.
        self._unsafe: dict[PreloadSet, str] = {}

    @property
    def pids(self) -> list[int]:
        """The process ids of the zygotes that run."""
        return [zygote.pid for zygote in self._running]

    def start(self, started: StartedZygote | None = None) -> None:
        """Start the zygote of models that have chosen nothing, or take over the one that was `started`.

        If that fails, it is tried again later.
        """
        self._restart = None
        slot = self._slot(_NOTHING_CHOSEN)
        try:
            self._start(slot, _NOTHING_CHOSEN, started)
        except OSError as error:
            self._start_later(slot, f"cannot be started: {error}")

    def join(self, preload: PreloadSet) -> ZygoteProcess:
        """Return the zygote for a set of modules, which may not be ready yet. The caller calls `leave` later.

        Raises `ZygoteLost` after too many ends in a row, and `OSError` if none can be started.
        """
        slot = self._slot(preload)
        if slot.zygote is not None and not slot.zygote.forks:
            slot.zygote = None
        if slot.zygote is None:
            if self._problem:
                raise ZygoteLost(self._problem)
            if self._closed or slot.not_before > asyncio.get_running_loop().time():
                raise ZygoteLost("it ended too often, and is started again later")
            self._make_room(preload)
            self._start(slot, preload)
        assert slot.zygote is not None
        slot.users += 1
        if slot.idle_timer is not None:
            slot.idle_timer.cancel()
            slot.idle_timer = None
        return slot.zygote

    def give_up(self, problem: str) -> None:
        """Start no more zygotes: the modules of all workers cannot be imported before a fork."""
        logger.error("workers are no longer forked: %s", problem)
        self._problem = problem

    def threads_left_by(self, preload: PreloadSet) -> str:
        """Return the threads that the import of a set has left before, so that no worker can be forked; "" if none."""
        return self._unsafe.get(preload, "")

    def is_unsafe(self, preload: PreloadSet, threads: str) -> None:
        """The import of a set has left `threads`: it is not tried again, unless its file changes."""
        self._unsafe[preload] = threads
        if len(self._unsafe) > _MAX_UNSAFE:
            del self._unsafe[next(iter(self._unsafe))]

    def has_forked(self, preload: PreloadSet) -> None:
        """A zygote of the set has forked a worker: if it ends, the next one is started at once."""
        self._slot(preload).backoff.reset()

    def leave(self, preload: PreloadSet) -> None:
        """A worker of the set has ended, or was not started."""
        slot = self._slot(preload)
        slot.users -= 1
        if not slot.users and preload != _NOTHING_CHOSEN and not self._closed:
            slot.idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle, preload)

    async def close(self) -> None:
        """End all zygotes, and wait for their ends. Workers that they have forked stay."""
        self._closed = True
        if self._restart is not None:
            self._restart.cancel()
        for slot in self._slots.values():
            if slot.idle_timer is not None:
                slot.idle_timer.cancel()
        for zygote in self._running:
            zygote.end()
        if self._running:
            await self._none_runs.wait()

    # ---- zygotes -----------------------------------------------------------------------------

    def _slot(self, preload: PreloadSet) -> _Slot:
        slot = self._slots.pop(preload, None) or _Slot()
        self._slots[preload] = slot
        return slot

    def _start(self, slot: _Slot, preload: PreloadSet, started: StartedZygote | None = None) -> None:
        if slot.zygote is None:
            slot.zygote = ZygoteProcess(preload, self._children, self._output_limits, self._zygote_ended, started)
            self._running.add(slot.zygote)
            self._none_runs.clear()

    def _make_room(self, wanted: PreloadSet) -> None:
        """End the zygote of chosen modules that was not used for the longest time, if there are too many."""
        if wanted == _NOTHING_CHOSEN:
            return
        running = [preload for preload, slot in self._slots.items() if slot.zygote and preload != _NOTHING_CHOSEN]
        for preload in running[: max(0, len(running) - MAX_CHOSEN + 1)]:
            logger.info("the zygote for '%s' is ended to make room for another one", ", ".join(preload.modules))
            self._end(preload)

    def _end_idle(self, preload: PreloadSet) -> None:
        slot = self._slots[preload]
        slot.idle_timer = None
        self._end(preload)
        del self._slots[preload]

    def _end(self, preload: PreloadSet) -> None:
        slot = self._slots[preload]
        zygote, slot.zygote = slot.zygote, None
        if zygote is not None:
            zygote.end()

    def _zygote_ended(self, zygote: ZygoteProcess, cause: str) -> None:
        self._running.discard(zygote)
        if not self._running:
            self._none_runs.set()
        slot = self._slots.get(zygote.preload)
        if slot is None or (slot.zygote is not zygote and slot.zygote is not None):
            return
        slot.zygote = None
        if self._closed:
            return
        if not cause:
            if zygote.preload == _NOTHING_CHOSEN and not self._problem:
                self.start()
        else:
            self._start_later(slot, f"has ended: {cause}", zygote.preload)

    def _start_later(self, slot: _Slot, problem: str, preload: PreloadSet = _NOTHING_CHOSEN) -> None:
        delay_s = slot.backoff.next_delay_s()
        loop = asyncio.get_running_loop()
        slot.not_before = loop.time() + delay_s
        logger.warning(
            "the process that forks workers %s. Running workers continue; a new one is started in %.0f s",
            problem, delay_s,
        )  # fmt: skip
        if preload == _NOTHING_CHOSEN:
            self._restart = loop.call_later(delay_s, self.start)
