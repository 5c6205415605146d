"""The children of the kernel: those that it has started, and those that it inherits as a subreaper.

Forked workers become children of the kernel because the kernel is a *subreaper* (PR_SET_CHILD_SUBREAPER): the system
gives it each process below it whose parent has ended. So it also inherits processes that models leave behind, for which
no other code waits. `KernelChildren` ends them with their worker, and waits for them.

It never waits for an arbitrary child (waitpid(-1)). That would consume the ends of processes for which other code
waits: of workers, by their pidfds, and of processes that a library in this process has started. It waits only for
processes with three properties:

- They are children of the main thread: the system gives inherited processes to it. What libraries start in other
  threads is listed with those.
- They are in another session than the kernel: each worker leads a session, and what it starts is in that session or in
  a newer one. What a library starts is in the kernel's session, unless it asks for another one; no code of ours does,
  except for processes that are recorded here.
- They are not recorded here. Workers, zygotes, the watcher, and children that were there before are. While a
  worker is being forked, whose number is not known yet, nothing is looked for.

A child keeps its number until it is waited for, and only this thread does that, so a signal cannot reach another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import signal
from typing import TYPE_CHECKING

import msgspec

from backends.launch.session_watcher import mark_of, stat_of
from backends.transport.zygote_messages import MARK, MARK_OPTION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36

#: How often inherited processes are looked for: usually, and while some are being ended, in seconds.
_LOOK_S = 1.0
_LOOK_SOON_S = 0.01

#: How many looks follow one another soon, and how many the end of the server waits for the end of these processes.
_SOON_LOOKS = 100


class Inherited(msgspec.Struct, frozen=True):
    """A child that the kernel has not started."""

    pid: int
    session: int
    #: Whether it has ended, and waits to be waited for.
    ended: bool
    #: The mark of the worker that has started it, or that has started what started it; "" if it has none.
    mark: str


def is_left_behind(child: Inherited, workers: dict[int, str]) -> bool:
    """Whether the worker of an inherited process has ended. `workers` has the marks of those that live. Pure.

    A process without a mark, in a session of its own, may be of any worker: it is ended with the server.
    """
    if child.session in workers:
        return False
    return bool(child.mark) and child.mark not in workers.values()


class KernelChildren:
    """Knows which children of this process run, and ends those that no other code ends. One for each server."""

    def __init__(self) -> None:
        #: The children of this process before it began to inherit.
        self._earlier: set[int] = set()
        #: Process → its mark; "" for a process that is not a worker.
        self._started: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._forks = 0
        self._inherits = False
        self._timer: asyncio.TimerHandle | None = None
        #: How many looks may follow soon; some processes cannot be killed.
        self._soon = _SOON_LOOKS

    def new_mark(self) -> str:
        """Return the mark of a worker that is to be started: no other worker of this machine has it now."""
        return f"{os.getpid()}.{next(self._numbers)}"

    def inherit(self, own: Iterable[int] = ()) -> None:
        """Make this process a subreaper, and look after what it inherits. Call it in the main thread, on its loop.

        `own` are children that were started for this object before, and that are added next. Raises `OSError` if
        the system does not list children (CONFIG_PROC_CHILDREN), or has no subreapers.
        """
        self._earlier = set(child_numbers()).difference(own)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
            raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
        self._inherits = True
        self._look_in(_LOOK_S)

    def add(self, pid: int, mark: str = "") -> None:
        """This process has started the process `pid`, and waits for its end. `mark` is the worker's mark."""
        self._started[pid] = mark

    def remove(self, pid: int) -> None:
        """The process `pid` has ended, and was waited for."""
        self._started.pop(pid, None)
        self._soon = _SOON_LOOKS
        if self._inherits:
            self._look_in(_LOOK_SOON_S)

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """While a worker is being forked, which is not recorded yet."""
        self._forks += 1
        try:
            yield
        finally:
            self._forks -= 1

    async def close(self) -> None:
        """End and wait for all inherited processes. All workers must have ended."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._inherits:
            return
        self._inherits = False
        for _ in range(_SOON_LOOKS):
            found = self._inherited()
            if not found:
                break
            for child in found:
                _end(child)
            await asyncio.sleep(_LOOK_SOON_S)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)

    # ---- inherited processes -----------------------------------------------------------------

    def _look_in(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        """Wait for inherited processes that have ended, and end those whose workers have."""
        self._timer = None
        left_behind = False
        if not self._forks:
            workers = {pid: mark for pid, mark in self._started.items() if mark}
            for child in self._inherited():
                if child.ended or is_left_behind(child, workers):
                    _end(child)
                    left_behind = True
        # What these processes have started is inherited next.
        soon = left_behind and self._soon > 0
        self._soon = self._soon - 1 if left_behind else _SOON_LOOKS
        self._look_in(_LOOK_SOON_S if soon else _LOOK_S)

    def _inherited(self) -> list[Inherited]:
        own_session = os.getsid(0)
        found, children = [], child_numbers()
        self._earlier.intersection_update(children)
        for pid in children:
            if pid in self._started or pid in self._earlier:
                continue
            stat = stat_of(pid)
            if stat is not None and stat.session != own_session:
                found.append(
                    Inherited(pid, stat.session, stat.ended, "" if stat.ended else mark_of(pid, MARK, MARK_OPTION))
                )
        return found


def child_numbers() -> list[int]:
    """Return the children of the main thread."""
    pid = os.getpid()
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(number) for number in file.read().split()]


def _end(child: Inherited) -> None:
    """Kill an inherited process, or wait for it if it has ended."""
    if not child.ended:
        logger.debug("ending process %d, left behind by a model", child.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child.pid, signal.SIGKILL)
        return
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
