"""The watcher: a small process that ends processes of models after their worker or the kernel has ended.

Each worker leads a session (setsid(2)), to which the processes belong that its model starts. Workers are killed by the
system when the kernel dies (`backends/worker/__main__.py`); processes that models have started are not. The kernel
starts this file as a script and writes lines to its standard input:

    +PID  a worker has started, with a session of its own
    -PID  the worker has ended: end its session
    .     the kernel continues, and ends the watcher

When the kernel is gone, or closes the input, the watcher ends all sessions that it knows, and then itself. If the
kernel is gone, it also ends processes that have left their session, by the mark that they have of their worker
(`backends/transport/zygote_messages.py`). It imports little, because each server has one.

A number of a process or session may be used again after its end. So the watcher remembers when each worker started, and
signals a process only through a descriptor (pidfd) whose process it has looked at again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import time

#: Not imported from `typing`, which takes long.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

#: How often the members of a session are looked for and killed, and the time between, in seconds: a process may start
#: others until it is killed.
_ROUNDS = 100
_ROUND_S = 0.01

#: The least time between two looks for processes of sessions whose workers have ended, in seconds.
_LOOK_S = 0.05

#: The longest time from the end of the input to the end of the kernel, if that is the reason, in seconds.
_END_S = 2.0


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


def mark_of(pid: int, variable: str, option: str) -> str:
    """Return the mark of the worker that has started a process, or that has started what started it; "" for none.

    It is in the environment of the process, or in the command line that a fork of a worker has.
    """
    for name, sign in (("environ", f"{variable}=".encode()), ("cmdline", option.encode())):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            for word in file.read().split(b"\0"):
                if word.startswith(sign):
                    return word[len(sign) :].decode("ascii", "replace")
    return ""


def _has_mark(pid: int, variable: str, option: str, prefix: str) -> bool:
    return mark_of(pid, variable, option).startswith(prefix)


def end_marked(kernel: int, variable: str, option: str) -> None:
    """Kill all processes with marks of workers of a kernel that is gone. Its number begins their marks."""
    prefix = f"{kernel}."
    for _ in range(_ROUNDS):
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        found = [pid for pid in pids if _has_mark(pid, variable, option, prefix)]
        if not found:
            return
        for pid in found:
            _kill_if(pid, functools.partial(_has_mark, pid, variable, option, prefix))
        time.sleep(_ROUND_S)


def members_of(sessions: dict[int, int]) -> list[tuple[int, int]]:
    """Return the processes that live in the sessions of workers, each with its session.

    `sessions` has for each worker when it started; 0 if it had ended before we looked.
    """
    for session, worker_started in list(sessions.items()):
        leader = stat_of(session)
        if leader is not None and leader.started != worker_started:
            del sessions[session]  # another process has the number now: nothing of the old session is left
    found = []
    for name in os.listdir("/proc"):
        # Of each process of the machine: a system call takes a tenth of the time of reading its file.
        if name.isdecimal() and _session_of(int(name)) in sessions:
            stat = stat_of(int(name))
            if stat is not None and stat.session in sessions and not stat.ended:
                found.append((int(name), stat.session))
    return found


def _session_of(pid: int) -> int:
    """Return the session of a process; 0 if there is no such process, or the system does not say it."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _in_session(pid: int, session: int) -> bool:
    stat = stat_of(pid)
    return stat is not None and stat.session == session


def _kill_if(pid: int, is_ours: Callable[[], bool]) -> None:
    """Kill a process if `is_ours` returns true while no other process can get the number."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if is_ours():
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
            _kill_if(pid, functools.partial(_in_session, pid, session))
        time.sleep(_ROUND_S)


class Watch:
    """The sessions of the workers that live, and what the kernel writes about them."""

    def __init__(self) -> None:
        #: Worker → when it started; 0 where that is not known, because it had ended before we looked.
        self.sessions: dict[int, int] = {}
        #: Whether the kernel has said that it continues without this watcher.
        self.dismissed = False
        #: Workers that have ended, as `sessions`: their sessions are to be ended.
        self.ended: dict[int, int] = {}
        self._partial = b""
        #: When it may look for processes of sessions again, of the monotonic clock.
        self._next_look_s = 0.0

    def feed(self, data: bytes) -> None:
        """Take what the kernel has written."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            if line == b".":
                self.dismissed = True
                continue
            pid = int(line[1:])
            if line.startswith(b"+"):
                stat = stat_of(pid)
                self.sessions[pid] = 0 if stat is None else stat.started
            elif pid in self.sessions:
                self.ended[pid] = self.sessions.pop(pid)

    def end_due(self) -> float | None:
        """End the sessions of ended workers, if it is time. Returns after how many seconds it is; None if none is left.

        To find the processes of a session, all processes of the machine are looked at. Where many workers end one after
        the other, that is done for several of them.
        """
        if not self.ended:
            return None
        rest_s = self._next_look_s - time.monotonic()
        if rest_s > 0:
            return rest_s
        ended, self.ended = self.ended, {}
        end_sessions(ended)
        self._next_look_s = time.monotonic() + _LOOK_S
        return None


def _is_gone(kernel_fd: int) -> bool:
    """Whether the kernel ends. The system closes its end of the input before it says so."""
    return bool(select.select([kernel_fd], [], [], _END_S)[0])


def main() -> None:
    kernel, variable, option = int(sys.argv[1]), *sys.argv[2:]
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
        rest_s = watch.end_due()
        # The input alone is not enough: a process that a program has forked keeps it open.
        kernel_gone = kernel_fd < 0 or kernel_fd in dict(poll.poll(None if rest_s is None else rest_s * 1000 + 1))
        try:
            while data := os.read(0, 65536):
                watch.feed(data)
            break
        except BlockingIOError:
            if kernel_gone:
                break
    end_sessions(watch.sessions | watch.ended)
    # A program may continue when its server has stopped, perhaps with another server.
    if not watch.dismissed and (kernel_fd < 0 or _is_gone(kernel_fd)):
        end_marked(kernel, variable, option)


if __name__ == "__main__":
    main()
