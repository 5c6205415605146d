"""Lowers the priority of the workers of a model version, so that they use only free processor time, and restores it.

There are two ways (sched(7)). The workers get each one that the machine has:

- Where Linux groups processes by sessions (`sched_autogroup_enabled`), each group has a nice value. A worker has a
  session of its own. Everybody may set it to 19 and back to 0, users without privileges once in 0.1 s.
- Elsewhere, for example in a control group, each thread gets the policy SCHED_IDLE. Without CAP_SYS_NICE, or a limit
  RLIMIT_NICE of 20, a thread cannot leave it. So it is used only if this process has seen that a thread can.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernel.serving.catalog import Catalog
    from kernel.serving.model import Model

#: The nice value of the group of a worker with low priority.
_LOWEST = 19

#: A thread that begins while the others are changed may have the former policy.
_PASSES = 3


class IdlePriority:
    """Implements `kernel.traffic.shadow_priority.ShadowPriority`. A call takes 0.1 ms for each worker."""

    def __init__(
        self, catalog: Catalog, processes: Path = Path("/proc"), regains: Callable[[], bool] | None = None
    ) -> None:
        """`regains` returns whether a thread can leave SCHED_IDLE; it is called once, when that is needed."""
        self._catalog = catalog
        self._processes = processes
        self._probe = regains or regains_priority
        self._regains: bool | None = None
        #: Process with the lowest priority → the nice value that its group had; None if it has no group of its own.
        self._lowered: dict[int, int | None] = {}

    def lower(self, model: Model) -> bool:
        """Lower the priority of the workers of a version; those that other versions share keep theirs.

        Returns False if the system wants the call again, at least 0.1 s later.
        """
        if self._regains is None:
            self._regains = self._probe()
        done = [self._lower(pid) for pid in _pids(model) - self._shared(model) if pid not in self._lowered]
        return all(done)

    def restore(self, model: Model) -> bool:
        """Give the workers of a version their priority again. Returns as `lower`."""
        gone = [pid for pid in self._lowered if not (self._processes / str(pid)).exists()]
        for pid in gone:
            del self._lowered[pid]
        done = [self._restore(pid) for pid in _pids(model) if pid in self._lowered]
        return all(done)

    def _shared(self, model: Model) -> set[int]:
        found: set[int] = set()
        for other in self._catalog.executing_models():
            if other is not model:
                found |= _pids(other)
        return found

    def _lower(self, pid: int) -> bool:
        group, former = self._group_of(pid), None
        try:
            if group is not None:
                former = int(group.read_text().split()[-1])  # "/autogroup-147754 nice 0"
                group.write_text(str(_LOWEST))
        except BlockingIOError:
            return False
        except (OSError, ValueError, IndexError):  # there are no such groups, or they are not ours to change
            former = None
        self._lowered[pid] = former
        if self._regains:
            self._set_policy(pid, os.SCHED_OTHER, os.SCHED_IDLE)
        return True

    def _restore(self, pid: int) -> bool:
        if self._regains:
            self._set_policy(pid, os.SCHED_IDLE, os.SCHED_OTHER)
        former, group = self._lowered[pid], self._group_of(pid)
        if former is not None and group is not None:
            try:
                group.write_text(str(former))
            except BlockingIOError:
                return False
            except OSError:  # it has ended
                pass
        del self._lowered[pid]
        return True

    def _group_of(self, pid: int) -> Path | None:
        """Return the file of the group of a process that has a session of its own."""
        try:
            return self._processes / str(pid) / "autogroup" if os.getsid(pid) == pid else None
        except OSError:
            return None

    def _set_policy(self, pid: int, former: int, policy: int) -> None:
        """Give all threads of a process that have the policy `former` another one."""
        for _ in range(_PASSES):
            changed = False
            with contextlib.suppress(OSError):  # it has ended
                for thread in os.listdir(self._processes / str(pid) / "task"):
                    with contextlib.suppress(ProcessLookupError):
                        if os.sched_getscheduler(int(thread)) == former:
                            os.sched_setscheduler(int(thread), policy, os.sched_param(0))
                            changed = True
            if not changed:
                return


def regains_priority() -> bool:
    """Return whether a thread can leave SCHED_IDLE. A new thread tries it, and ends."""
    found = False

    def attempt() -> None:
        nonlocal found
        with contextlib.suppress(OSError):
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
                os.sched_setscheduler(0, policy, os.sched_param(0))  # 0 is the calling thread
            found = True

    thread = threading.Thread(target=attempt, name="priority probe")
    thread.start()
    thread.join()
    return found


def _pids(model: Model) -> set[int]:
    """Return the processes of a version on this machine."""
    return set(model.statistics.memory.pids.values())
