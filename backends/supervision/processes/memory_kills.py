"""Whether the system ends processes because memory has run out (OOM killer): an operator sees only SIGKILL else."""

from __future__ import annotations

import time

from kernel.machine import memory_kill_count

#: A kill explains the ends that are noticed within this time after it, in seconds: several workers may end together.
_EXPLAINS_S = 5.0


class MemoryKills:
    """Counts the system's kills from when it is made."""

    def __init__(self) -> None:
        self._count = memory_kill_count()
        self._noticed_s = float("-inf")

    def explain_kill(self) -> bool:
        """Whether a process that has just ended by SIGKILL was probably killed because memory had run out."""
        now_s, count = time.monotonic(), memory_kill_count()
        if count > self._count:
            self._noticed_s = now_s
        self._count = count
        return now_s - self._noticed_s < _EXPLAINS_S
