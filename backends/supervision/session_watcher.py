"""The watcher: a small process that ends what models have started when a worker or the kernel is gone.

Each worker leads a session (setsid(2)), to which the processes belong that its model starts. Workers are killed by the
system when the kernel dies (`backends/worker/__main__.py`); processes that models have started are not. The kernel
starts this file as a script and writes lines to its standard input:

    +PID  a worker has started, with a session of its own
    -PID  the worker has ended: end its session

When the kernel is gone, or closes the input, the watcher ends all sessions that it knows, and then itself. It imports
little, because each server has one.

A number of a process or session may be used again after its end. So the watcher remembers when each worker started, and
signals a process only through a descriptor (pidfd) whose process it has looked at again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

#: How often the members of a session are looked for and killed, and the time between, in seconds: a process may start
#: others until it is killed.
_ROUNDS = 100
_ROUND_S = 0.01


class ProcessStat:
    """What /proc says of a process: its session, and when it started, in clock ticks since the machine started."""

    def __init__(self, text: str) -> None:
        fields = text.rpartition(")")[2].split()  # the name of the program stands in parentheses, and may have others
        self.ended = fields[0] in ("Z", "X")
        self.session = int(fields[3])
        self.started = int(fields[19])


def stat_of(pid: int) -> ProcessStat | None:
    """Return what /proc says of a process; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return ProcessStat(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def members_of(sessions: dict[int, int]) -> list[tuple[int, int]]:
    """Return the processes that live in the sessions of workers, each with its session.

    `sessions` has for each worker when it started; 0 where it had ended before we looked.
    """
    for session, worker_started in list(sessions.items()):
        leader = stat_of(session)
        if leader is not None and leader.started != worker_started:
            del sessions[session]  # the number is that of another process now: nothing of the old session is left
    found = []
    for name in os.listdir("/proc"):
        stat = stat_of(int(name)) if name.isdecimal() else None
        if stat is not None and stat.session in sessions and not stat.ended:
            found.append((int(name), stat.session))
    return found


def kill_member(pid: int, session: int) -> None:
    """Kill a process if it belongs to the session."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        stat = stat_of(pid)  # looked at again: now the number cannot become that of another process
        if stat is not None and stat.session == session:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(pidfd)


def end_sessions(sessions: dict[int, int]) -> None:
    """Kill all processes of the sessions of workers, see `members_of`."""
    for _ in range(_ROUNDS):
        members = members_of(sessions)
        if not members:
            return
        for pid, session in members:
            kill_member(pid, session)
        time.sleep(_ROUND_S)


class Watch:
    """The sessions of the workers that live, and what the kernel writes about them."""

    def __init__(self) -> None:
        #: Worker → when it started; 0 where that is not known, because it had ended before we looked.
        self.sessions: dict[int, int] = {}
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Take what the kernel has written."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            pid = int(line[1:])
            if line.startswith(b"+"):
                stat = stat_of(pid)
                self.sessions[pid] = 0 if stat is None else stat.started
            elif pid in self.sessions:
                end_sessions({pid: self.sessions.pop(pid)})


def main() -> None:
    kernel = int(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the kernel, also if all processes of a service get these
    watch = Watch()
    poll = select.poll()
    poll.register(0, select.POLLIN)
    os.set_blocking(0, False)
    kernel_fd = -1
    if os.getppid() == kernel:  # else it is gone already
        kernel_fd = os.pidfd_open(kernel)
        poll.register(kernel_fd, select.POLLIN)
    while True:
        # The input alone is not enough: a process that a program has forked keeps it open.
        kernel_gone = kernel_fd < 0 or kernel_fd in dict(poll.poll())
        try:
            while data := os.read(0, 65536):
                watch.feed(data)
            break
        except BlockingIOError:
            if kernel_gone:
                break
    end_sessions(watch.sessions)


if __name__ == "__main__":
    main()
