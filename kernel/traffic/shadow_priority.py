"""Decides when the version that gets the copies of a shadow has low priority.

Low priority begins with the first copy for a version that gets nothing else. It ends with the first request of a client
for the version, or when the version gets a share. No I/O: a `ShadowPriority` does what is decided here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kernel.loop.clock import Alarm, Clock
    from kernel.serving.model import Model

#: How long no client has used the version before its priority is lowered again.
QUIET_NS = 1_000_000_000

#: The time between two tries to set a priority.
TRY_NS = 150_000_000


class ShadowPriority(Protocol):
    """Sets the priority of workers at the system. Implemented by `backends.supervision.idle_priority.IdlePriority`."""

    def lower(self, model: Model) -> bool:
        """Give the workers of a version only free processor time.

        Returns False if it must be called again, at least 0.1 s later. Never raises.
        """

    def restore(self, model: Model) -> bool:
        """Give the workers of a version their usual priority again. Returns as `lower`."""


class TargetPriority:
    """The priority of the target of one shadow."""

    def __init__(self, clock: Clock, system: ShadowPriority | None) -> None:
        """`system` is None where workers keep their priority."""
        self._clock = clock
        self._system = system
        self._target: Model | None = None
        #: Whether the target has no other work than copies, as far as the rule says.
        self._only_copies = False
        #: The version whose workers have the lowest priority, and its processes then.
        self._lowered: Model | None = None
        self._pids: list[int] | None = None
        #: When a client has used the target last, and when a priority was lowered last.
        self._used_ns = self._tried_ns = -QUIET_NS
        self._again: Alarm | None = None

    def aim(self, target: Model | None, *, only_copies: bool) -> None:
        """Set the target, or None. With `only_copies` the rule sends it nothing else."""
        self._target, self._only_copies = target, only_copies
        if self._lowered is not None and not (only_copies and self._lowered is target):
            self._restore()

    def used(self) -> None:
        """A client's request goes to the target."""
        self._used_ns = self._clock.now_ns()
        if self._lowered is not None:
            self._restore()

    def before_copy(self) -> None:
        """The target gets a copy now."""
        target, now_ns = self._target, self._clock.now_ns()
        if self._system is None or target is None or not self._only_copies or now_ns - self._used_ns < QUIET_NS:
            return
        pids = list(target.statistics.memory.pids.values())
        if self._lowered is target and self._pids == pids:
            return
        if self._again is not None or now_ns - self._tried_ns < TRY_NS:  # the former one has to be restored first
            return
        self._tried_ns, self._lowered = now_ns, target
        self._pids = pids if self._system.lower(target) else None

    def _restore(self) -> None:
        """Give the version its priority again, and try it again if the system is not ready for that."""
        if self._system is None or self._lowered is None:
            return
        if not self._system.restore(self._lowered):
            if self._again is None:
                self._again = self._clock.alarm(self._restore)
            self._again.set(self._clock.now_ns() + TRY_NS)
            return
        self._lowered = None
        if self._again is not None:
            self._again.close()
            self._again = None
