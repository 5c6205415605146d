"""Gives a helper low priority, so that models, the kernel and clients of this machine run first."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Added to the nice value of the server.
NICENESS = 10

_AUTOGROUP = Path("/proc/self/autogroup")

#: The system changes an autogroup at most once in 0.1 s for users without privileges, and says EAGAIN otherwise.
_ATTEMPTS, _PAUSE_S = 3, 0.11


def lower_priority(autogroup: Path = _AUTOGROUP) -> None:
    """Lower the priority of this process and of its session.

    Where Linux groups processes by sessions, the nice value counts only among the processes of a session. Each helper
    has a session of its own, so its group needs the value too (sched(7), "The autogroup feature").
    """
    niceness = os.nice(NICENESS)
    for attempt in range(_ATTEMPTS):
        try:
            autogroup.write_text(str(niceness))
        except BlockingIOError:
            if attempt < _ATTEMPTS - 1:
                time.sleep(_PAUSE_S)
        except OSError:
            return  # there are no such groups, or they are not ours to change
        else:
            return
