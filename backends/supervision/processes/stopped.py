"""Whether a signal has stopped a child process."""

from __future__ import annotations

import os


def is_stopped(pidfd: int) -> bool:
    """Whether a child of this process is stopped (SIGSTOP). A process that a debugger holds does not count.

    One system call, which leaves the report for the next call (waitid(2)).
    """
    try:
        found = os.waitid(os.P_PIDFD, pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return found is not None
